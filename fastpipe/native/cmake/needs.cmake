# What fastpipe is compiled with, in words.
set(HOW_TO_GET_WHAT_IS_NEEDED "It takes a C++17 compiler and libjpeg-turbo's headers:
  Debian, Ubuntu:  apt-get install g++ libjpeg-dev
  Fedora, RHEL:    dnf install gcc-c++ libjpeg-turbo-devel
  conda:           conda install -c conda-forge cxx-compiler libjpeg-turbo")
