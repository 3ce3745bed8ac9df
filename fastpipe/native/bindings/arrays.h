// NumPy arrays as the core takes them: checked, never converted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "../augment.h"
#include "../engine.h"
#include "../scratch.h"
#include "../span.h"

namespace nb = nanobind;

namespace fastpipe::bindings {

template <typename T, std::size_t N>
using In = nb::ndarray<const T, nb::numpy, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T, std::size_t N>
using Out = nb::ndarray<T, nb::numpy, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline Bytes bytes_of(const nb::bytes& object) {
  return {reinterpret_cast<const std::uint8_t*>(object.c_str()), object.size()};
}

// Encoded bytes: any object with a contiguous buffer, held while the lock is not.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) nb::raise_python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Bytes bytes() const { return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_{};
};

// An array over memory that it owns from now on.
template <typename Memory>
nb::ndarray<nb::numpy, std::uint8_t> owned(Memory&& memory, std::initializer_list<std::size_t> shape) {
  std::uint8_t* data = memory.release();
  nb::capsule owner(data, [](void* pointer) noexcept { std::free(pointer); });
  return nb::ndarray<nb::numpy, std::uint8_t>(data, shape, owner);
}

inline void check(bool is_so, const char* what) {
  if (!is_so) throw nb::value_error(what);
}

// The calling thread's scratch, with nothing in it.
inline Scratch& own_scratch() {
  Scratch* scratch = thread_scratch();
  if (scratch == nullptr) throw std::bad_alloc();
  scratch->arena.reset();
  return *scratch;
}

// An object of Python's for the core to refer to, but not to own: nanobind's own pointers give it back with Python's
// lock held, for which a thread of the engine would wait.  Whoever refers to it keeps the object.
template <typename T>
std::shared_ptr<T> lent(T* object) {
  return std::shared_ptr<T>(std::shared_ptr<T>(), object);
}

// A channel, which a job may hold longer than the script does.
struct BoundChannel {
  std::shared_ptr<Channel> channel;
};

// A batch for the engine, and the objects that it refers to: dropped with the lock held, by whoever drops the batch.
struct BoundWork {
  std::shared_ptr<Work> any;
  nb::object keep;
};

// Images that a plan changes.
struct BoundAugment : BoundWork {
  std::shared_ptr<AugmentBatch> work;
  std::vector<std::int64_t> places;  // in bytes
};

// What a job writes to lives until its event `done` is handed out, whatever becomes of the objects of the script:
// Ctrl-C may come right after a job was submitted.  Both are called with Python's lock held.
void keep_until_done(std::int64_t job, nb::handle batch);
void let_go_of(std::int64_t job);

void register_augment(nb::module_& m);
void register_augment_motion(nb::module_& m);
void register_engine(nb::module_& m);
void register_augment_volumes(nb::module_& m);
void register_cache(nb::module_& m);
void register_chunks(nb::module_& m);
void register_images(nb::module_& m);
void register_patches(nb::module_& m);
void register_tours(nb::module_& m);
void register_units(nb::module_& m);

}  // namespace fastpipe::bindings
