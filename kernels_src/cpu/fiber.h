// A fiber: a function with a stack of its own that can be suspended and resumed. Every switch is
// between a fiber and the scheduler, which runs on the OS thread's own stack.
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
struct Stack {
    const void* bottom;
    size_t bytes;
    void* saved;  // what AddressSanitizer keeps while the stack is not in use
};
#ifdef __SANITIZE_ADDRESS__
inline void leave_stack(Stack& from, const Stack& to) {
    __sanitizer_start_switch_fiber(&from.saved, to.bottom, to.bytes);
}
inline void enter_stack(const Stack& to, Stack& from) {
    __sanitizer_finish_switch_fiber(to.saved, &from.bottom, &from.bytes);
}
inline void forbid(void* start, size_t bytes) { __asan_poison_memory_region(start, bytes); }
inline void allow(void* start, size_t bytes) { __asan_unpoison_memory_region(start, bytes); }
#else
UNSEEN inline void leave_stack(Stack&, const Stack&) {}
UNSEEN inline void enter_stack(const Stack&, Stack&) {}
inline void forbid(void*, size_t) {}
inline void allow(void*, size_t) {}
#endif

class Fiber {
  public:
    // `entry` calls entered() first of all, and never returns.
    void prepare(char* stack, size_t bytes, void (*entry)()) {
        allow(stack, bytes);  // an earlier fiber on it may have been abandoned
        own_stack_ = {stack, bytes, nullptr};
        prepare_context(own_, stack, bytes, entry);
    }
    UNSEEN void entered() { enter_stack(own_stack_, scheduler_stack_); }

    // Called by the fiber: back to the scheduler, until it resumes the fiber.
    UNSEEN void suspend() {
        leave_stack(own_stack_, scheduler_stack_);
        switch_context(&own_, &scheduler_);
        entered();
    }

    // Called by the scheduler: runs the fiber until it suspends.
    UNSEEN void resume() {
        leave_stack(scheduler_stack_, own_stack_);
        switch_context(&scheduler_, &own_);
        enter_stack(scheduler_stack_, own_stack_);
    }

  private:
    Context own_, scheduler_;
    Stack own_stack_, scheduler_stack_;
};

}  // namespace cpu
