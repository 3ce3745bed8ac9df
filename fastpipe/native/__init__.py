"""The native core, in C++: see README.md beside this file."""
