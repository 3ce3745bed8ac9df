# The C libraries that decode: each a static one where it can be had, so that no other copy in the process is ever met;
# else the system's shared one.
include(CheckCXXSourceCompiles)

# Define a target for a library.
#
# name: of the target; NAME_INCLUDE_DIR, NAME_STATIC and NAME_SHARED, in capitals, say where to look.
# library: its file is lib<library>.a or lib<library>.so.
# words: how messages call it, with the oldest release that will do.
# source: a program that uses what fastpipe uses of it.
function(fastpipe_library name library header words source)
  string(TOUPPER ${name} NAME)
  find_path(${NAME}_INCLUDE_DIR ${header})
  find_library(${NAME}_STATIC NAMES lib${library}.a)
  find_library(${NAME}_SHARED NAMES ${library})
  if(NOT ${NAME}_INCLUDE_DIR OR NOT (${NAME}_STATIC OR ${NAME}_SHARED))
    message(FATAL_ERROR "${words} is missing here, or its header ${header}. ${HOW_TO_GET_WHAT_IS_NEEDED}")
  endif()

  # A static library serves only where it was compiled so that it can be part of a shared one, which must be complete.
  set(CMAKE_REQUIRED_INCLUDES ${${NAME}_INCLUDE_DIR})
  set(CMAKE_REQUIRED_FLAGS "-shared -fPIC")
  if(NOT FASTPIPE_SANITIZE AND NOT FASTPIPE_FUZZ)  # whose functions are the program's
    string(APPEND CMAKE_REQUIRED_FLAGS " -Wl,-z,defs")
  endif()
  if(${NAME}_STATIC)
    set(CMAKE_REQUIRED_LIBRARIES ${${NAME}_STATIC} "-Wl,--exclude-libs,ALL")
    check_cxx_source_compiles("${source}" FASTPIPE_STATIC_${NAME})
  endif()
  if(${NAME}_SHARED AND NOT FASTPIPE_STATIC_${NAME})
    set(CMAKE_REQUIRED_LIBRARIES ${${NAME}_SHARED})
    check_cxx_source_compiles("${source}" FASTPIPE_SHARED_${NAME})
  endif()

  if(FASTPIPE_STATIC_${NAME})
    set(found ${${NAME}_STATIC})
  elseif(FASTPIPE_SHARED_${NAME})
    set(found ${${NAME}_SHARED})
  else()
    message(FATAL_ERROR "The library that is here is not ${words}. ${HOW_TO_GET_WHAT_IS_NEEDED}")
  endif()
  message(STATUS "${words}: ${found}")
  add_library(fastpipe_${name} INTERFACE)
  target_include_directories(fastpipe_${name} INTERFACE ${${NAME}_INCLUDE_DIR})
  target_link_libraries(fastpipe_${name} INTERFACE ${found})
endfunction()

fastpipe_library(jpeg jpeg jpeglib.h "libjpeg-turbo 1.5 or later" "
#include <cstdio>
#include <jpeglib.h>
#ifndef LIBJPEG_TURBO_VERSION_NUMBER
#error not libjpeg-turbo
#endif
extern \"C\" int use(jpeg_decompress_struct* d, JDIMENSION* n, JSAMPARRAY rows) {
  jpeg_create_decompress(d);
  jpeg_mem_src(d, nullptr, 0);
  jpeg_read_header(d, TRUE);
  jpeg_start_decompress(d);
  jpeg_crop_scanline(d, n, n);
  jpeg_read_scanlines(d, rows, 1);
  jpeg_abort_decompress(d);
  jpeg_destroy_decompress(d);
  return int(jpeg_skip_scanlines(d, 1));
}
")

fastpipe_library(deflate deflate libdeflate.h "libdeflate 1.3 or later" "
#include <libdeflate.h>
extern \"C\" int use(libdeflate_decompressor* d, void* memory, size_t* n) {
  libdeflate_free_decompressor(libdeflate_alloc_decompressor());
  return libdeflate_zlib_decompress(d, memory, 1, memory, 1, n) +
         libdeflate_gzip_decompress_ex(d, memory, 1, memory, 1, n, n);
}
")

fastpipe_library(zstd zstd zstd.h "zstd 1.3 or later" "
#include <zstd.h>
extern \"C\" int use(void* memory) {
  ZSTD_DCtx* d = ZSTD_createDCtx();
  ZSTD_freeDCtx(d);
  return int(ZSTD_decompressDCtx(d, memory, 1, memory, 1));
}
")

fastpipe_library(lz4 lz4 lz4.h "LZ4 1.7 or later" "
#include <lz4.h>
extern \"C\" int use(const char* from, char* to) { return LZ4_decompress_safe(from, to, 1, 1); }
")
