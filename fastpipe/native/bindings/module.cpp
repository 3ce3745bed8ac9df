#include "arrays.h"

NB_MODULE(_native, m) {
  m.doc() = "fastpipe's native core: see fastpipe/native/README.md.";
  nb::set_leak_warnings(false);  // for users; tests of the core run under a leak checker
  fastpipe::bindings::register_augment_motion(m);
  fastpipe::bindings::register_engine(m);
  fastpipe::bindings::register_augment(m);
  fastpipe::bindings::register_augment_volumes(m);
  fastpipe::bindings::register_cache(m);
  fastpipe::bindings::register_chunks(m);
  fastpipe::bindings::register_images(m);
  fastpipe::bindings::register_patches(m);
  fastpipe::bindings::register_tours(m);
  fastpipe::bindings::register_units(m);
}
