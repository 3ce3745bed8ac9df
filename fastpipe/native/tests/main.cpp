#include "check.h"

int main(int argc, char** argv) { return fastpipe::tests::run_all(argc > 1 ? argv[1] : nullptr); }
