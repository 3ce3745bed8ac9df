// What the compiler needs to know to compile kernels for each Level: for files with kernels only.
#pragma once

#include "simd.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FASTPIPE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define FASTPIPE_SANITIZED 1
#endif
#endif

#if (defined(__x86_64__) || defined(__i386__)) && !defined(FASTPIPE_SANITIZED)
#define FASTPIPE_X86 1
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined vectors inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define FASTPIPE_AVX2 __attribute__((target("avx2,fma")))
#define FASTPIPE_AVX512                                                                       \
  __attribute__((                                                                             \
      target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vnni,avx2,fma," \
             "prefer-vector-width=512")))
#else
#define FASTPIPE_AVX2 __attribute__((target("avx2,fma")))
#define FASTPIPE_AVX512                                                                                   \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vnni,avx2,fma"), \
                 min_vector_width(512)))
#endif
#include <immintrin.h>
#endif

// Loops of a few rounds over vectors, which are to stay in registers also where the compiler saves space.
#if defined(__clang__)
#define FASTPIPE_UNROLLED _Pragma("clang loop unroll(full)")
#else
#define FASTPIPE_UNROLLED _Pragma("GCC unroll 16")
#endif
