// A folder of a test's files.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace fastpipe::tests {

// A folder for one test, removed with what is in it.
class Folder {
 public:
  Folder() {
    const char* parent = std::getenv("TMPDIR");
    path_ = std::string(parent != nullptr ? parent : "/tmp") + "/fastpipe_files_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~Folder() {
    for (const std::string& path : made_) {
      if (::unlink(path.c_str()) != 0) ::rmdir(path.c_str());
    }
    ::rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path(const char* name) {
    made_.push_back(path_ + "/" + name);
    return made_.back();
  }
  std::string write(const char* name, const std::vector<std::uint8_t>& bytes) {
    const std::string path = this->path(name);
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) std::abort();
    if (!bytes.empty() && std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size()) std::abort();
    std::fclose(file);
    return path;
  }

 private:
  std::string path_;
  std::vector<std::string> made_;
};

}  // namespace fastpipe::tests
