// The first error of a launch, and its sentence. A kernel never throws: the thread that fails is
// not resumed, the launch ends in order, and its EXPORT function returns the code.
#pragma once

#include <driver_types.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace [[gnu::visibility("hidden")]] cpu {

constexpr int kTextBytes = 1024;

// Of the last launch on this OS thread that failed.
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local char last_error_text[kTextBytes];

class Failure {
  public:
    bool happened() const { return __atomic_load_n(&claimed_, __ATOMIC_RELAXED); }

    // Keeps the error unless another came first.
    [[gnu::format(printf, 3, 4)]] void keep(cudaError_t code, const char* format, ...) {
        if (__atomic_exchange_n(&claimed_, true, __ATOMIC_RELAXED)) return;
        code_ = code;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text_, kTextBytes, format, arguments);
        va_end(arguments);
    }

    // Called by the launching OS thread when all blocks have ended.
    cudaError_t publish() const {
        if (!happened()) return cudaSuccess;
        last_error = code_;
        memcpy(last_error_text, text_, kTextBytes);
        return code_;
    }

  private:
    bool claimed_ = false;
    cudaError_t code_ = cudaSuccess;
    char text_[kTextBytes] = {};
};

}  // namespace cpu

// What went wrong in the last launch.
EXPORT const char* kernel_error_text(int code) {
    if (code != cpu::last_error) {
        cpu::last_error = static_cast<cudaError_t>(code);
        snprintf(cpu::last_error_text, cpu::kTextBytes, "CUDA error %d", code);
    }
    return cpu::last_error_text;
}
