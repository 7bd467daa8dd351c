// Where in the kernel's source a call stands. Whatever can fail takes one as its last, default
// argument, which g++ fills in at the call.
#pragma once

#include <string.h>

// What only a build that looks for data races does, see races.h. The detector's own accesses to
// memory are not, and those of the scheduler and of models, which cost the most, need not be,
// instrumented: UNSEEN.
#ifdef RACES
#define IN_RACES(...) __VA_ARGS__
#define UNSEEN __attribute__((no_sanitize("thread")))
#else
#define IN_RACES(...)
#define UNSEEN
#endif

namespace [[gnu::visibility("hidden")]] cpu {

inline bool same_text(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }

struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    bool operator==(const Site& other) const {
        return line == other.line && same_text(file, other.file);
    }
};

}  // namespace cpu
