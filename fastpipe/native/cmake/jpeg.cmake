# libjpeg-turbo: a static library where it can be had, so that no other libjpeg of the process is ever met; else the
# system's shared one.  Defines the target fastpipe_jpeg.
include(CheckCXXSourceCompiles)

find_path(JPEG_INCLUDE_DIR jpeglib.h)
find_library(JPEG_STATIC NAMES libjpeg.a)
find_library(JPEG_SHARED NAMES jpeg)

if(NOT JPEG_INCLUDE_DIR OR NOT (JPEG_STATIC OR JPEG_SHARED))
  message(FATAL_ERROR "libjpeg-turbo's headers are missing here, with which fastpipe is compiled. ${HOW_TO_GET_WHAT_IS_NEEDED}")
endif()

set(CMAKE_REQUIRED_INCLUDES ${JPEG_INCLUDE_DIR})
set(uses_libjpeg "
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
add_library(fastpipe_jpeg INTERFACE)
target_include_directories(fastpipe_jpeg INTERFACE ${JPEG_INCLUDE_DIR})

# A static library serves only where it was compiled so that it can be part of a shared one.
set(CMAKE_REQUIRED_FLAGS "-shared -fPIC")
set(CMAKE_REQUIRED_LIBRARIES ${JPEG_STATIC} "-Wl,--exclude-libs,ALL")
if(JPEG_STATIC)
  check_cxx_source_compiles("${uses_libjpeg}" FASTPIPE_STATIC_JPEG)
endif()
set(CMAKE_REQUIRED_LIBRARIES ${JPEG_SHARED})
if(NOT FASTPIPE_STATIC_JPEG)
  check_cxx_source_compiles("${uses_libjpeg}" FASTPIPE_SHARED_JPEG)
endif()
unset(CMAKE_REQUIRED_FLAGS)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_INCLUDES)

if(FASTPIPE_STATIC_JPEG)
  message(STATUS "libjpeg-turbo: ${JPEG_STATIC}")
  target_link_libraries(fastpipe_jpeg INTERFACE ${JPEG_STATIC})
elseif(FASTPIPE_SHARED_JPEG)
  message(STATUS "libjpeg-turbo: ${JPEG_SHARED}")
  target_link_libraries(fastpipe_jpeg INTERFACE ${JPEG_SHARED})
else()
  message(FATAL_ERROR "The libjpeg that is here is not libjpeg-turbo 1.5 or later. ${HOW_TO_GET_WHAT_IS_NEEDED}")
endif()
