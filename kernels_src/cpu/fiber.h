// A fiber: a function with a stack of its own that goes on where it was left. The scheduler is one
// too, on the OS thread's own stack.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "site.h"

namespace [[gnu::visibility("hidden")]] cpu {

#ifdef __x86_64__

// Whoever does not run has the registers that a call preserves on top of its stack.
struct Context {
    void* stack_pointer;
};

// From the first to the second. Ten times as fast as swapcontext, which makes a system call.
[[gnu::naked, gnu::noinline, gnu::noipa]] inline void switch_context(Context*, Context*) {
    asm volatile(
        "pushq %%rbp; pushq %%rbx; pushq %%r12; pushq %%r13; pushq %%r14; pushq %%r15\n"
        "movq %%rsp, (%%rdi); movq (%%rsi), %%rsp\n"
        "popq %%r15; popq %%r14; popq %%r13; popq %%r12; popq %%rbx; popq %%rbp\n"
        "popq %%rcx; jmp *%%rcx" ::
            : "memory");
}

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    const uintptr_t top = reinterpret_cast<uintptr_t>(stack + bytes) / 16 * 16;
    void** frame = reinterpret_cast<void**>(top) - 8;  // 6 registers, entry, its return address
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(entry);
    context.stack_pointer = frame;
}

#else

struct Context {
    ucontext_t state;
};

inline void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

#endif

// AddressSanitizer is told of every switch, and of memory that may and may not be used.
#ifdef __SANITIZE_ADDRESS__
inline void forbid(void* start, size_t bytes) { __asan_poison_memory_region(start, bytes); }
inline void allow(void* start, size_t bytes) { __asan_unpoison_memory_region(start, bytes); }
#else
inline void forbid(void*, size_t) {}
inline void allow(void*, size_t) {}
#endif

class Fiber {
  public:
    // `entry` calls entered() first of all, and never returns.
    void prepare(char* stack, size_t bytes, void (*entry)()) {
        allow(stack, bytes);  // an earlier fiber on it may have been abandoned
        stack_ = {stack, bytes, nullptr};
        prepare_context(context_, stack, bytes, entry);
    }

    // From the fiber that runs, this one, to another; returns when one switches back.
    UNSEEN void switch_to(Fiber& other) {
#ifdef __SANITIZE_ADDRESS__
        left_ = this;
        __sanitizer_start_switch_fiber(&stack_.saved, other.stack_.bottom, other.stack_.bytes);
#endif
        switch_context(&context_, &other.context_);
        entered();
    }
    UNSEEN void entered() {
#ifdef __SANITIZE_ADDRESS__  // which knows the scheduler's stack, too
        __sanitizer_finish_switch_fiber(stack_.saved, &left_->stack_.bottom, &left_->stack_.bytes);
#endif
    }

  private:
    Context context_;
    struct {
        const void* bottom;
        size_t bytes;
        void* saved;  // what AddressSanitizer keeps while the stack is not in use
    } stack_;
#ifdef __SANITIZE_ADDRESS__
    static inline thread_local Fiber* left_;
#endif
};

}  // namespace cpu
