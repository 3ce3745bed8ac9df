// Runs a fuzz target over files, and all files in folders, that are named as arguments: for builds without libFuzzer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

bool run(const fs::path& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot open %s\n", path.c_str());
    return false;
  }
  std::vector<std::uint8_t> content;
  std::uint8_t block[1 << 16];
  for (std::size_t read; (read = std::fread(block, 1, sizeof(block), file)) > 0;) {
    content.insert(content.end(), block, block + read);
  }
  std::fclose(file);
  // Memory of exactly that size: a sanitizer sees a read behind its end.
  const auto exact = std::make_unique<std::uint8_t[]>(content.size());
  std::copy(content.begin(), content.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), content.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<fs::path> paths;
  for (int i = 1; i < argc; ++i) {
    std::error_code error;
    if (!fs::is_directory(argv[i], error)) {
      paths.emplace_back(argv[i]);
      continue;
    }
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(argv[i], error)) {
      if (entry.is_regular_file(error)) paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::size_t ran = 0;
  for (const fs::path& path : paths) ran += run(path) ? 1 : 0;
  std::printf("%zu inputs\n", ran);
  return ran > 0 && ran == paths.size() ? 0 : 1;
}
