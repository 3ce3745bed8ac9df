# What fastpipe is compiled with, in words.
set(HOW_TO_GET_WHAT_IS_NEEDED "It takes a C++17 compiler and libjpeg-turbo, libdeflate, zstd and LZ4 with their headers:
  Debian, Ubuntu:  apt-get install g++ libjpeg-dev libdeflate-dev libzstd-dev liblz4-dev
  Fedora, RHEL:    dnf install gcc-c++ libjpeg-turbo-devel libdeflate-devel libzstd-devel lz4-devel
  conda:           conda install -c conda-forge cxx-compiler libjpeg-turbo libdeflate zstd lz4-c")
