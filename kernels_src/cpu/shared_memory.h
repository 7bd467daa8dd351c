// A block's shared memory: one arena, whose offsets stand for the GPU's 32-bit shared addresses.
// Arrays start as NaN, and a guard lies before and after each, where a write out of bounds shows.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fiber.h"
#include "site.h"

namespace [[gnu::visibility("hidden")]] cpu {

constexpr size_t kSharedLimit = 227 * 1024;  // of a block on sm_90, dynamic and static together
constexpr size_t kStaticSharedLimit = 48 * 1024;  // of what SHARED declares

// What one SHARED declares; its address tells it from all others.
struct SharedDeclaration {
    const char* name;
    size_t bytes, element_bytes;
};

class SharedMemory {
  public:
    static constexpr size_t kArenaBytes = 256 * 1024;  // what the 18-bit addresses of wgmma reach

    SharedMemory() : base_(static_cast<char*>(aligned_alloc(kDynamicOffset, kArenaBytes))) {
        for (size_t i = 0; i < sizeof pattern_; ++i) pattern_[i] = "\xC5\x7F"[i % 2];
    }
    ~SharedMemory() {
        allow(base_, kArenaBytes);
        free(base_);
    }
    SharedMemory(const SharedMemory&) = delete;

    // A block begins; it has dynamic shared memory only.
    void begin(size_t dynamic_bytes) {
        allow(base_, kArenaBytes);
        count_ = 0;
        static_bytes_ = 0;
        dynamic_bytes_ = dynamic_bytes;
        end_ = kDynamicOffset - kGuardBytes;
        add_guard();
        add(&kDynamic, dynamic_bytes);
    }
    void* dynamic() const { return base_ + kDynamicOffset; }

    // The array of this declaration, which all threads of the block share; nullptr if it does not
    // fit.
    void* find_or_add(const SharedDeclaration* declaration) {
        for (int i = count_ - 1; i > 0; --i) {
            if (arrays_[i].declaration == declaration) return base_ + arrays_[i].offset;
        }
        static_bytes_ += declaration->bytes;
        if (static_bytes_ > kStaticSharedLimit || static_bytes_ + dynamic_bytes_ > kSharedLimit ||
            count_ == kMaxArrays) {
            return nullptr;
        }
        add(declaration, declaration->bytes);
        return base_ + arrays_[count_ - 1].offset;
    }
    size_t static_bytes() const { return static_bytes_; }
    size_t dynamic_bytes() const { return dynamic_bytes_; }

    UNSEEN bool contains(const void* pointer) const {
        return pointer >= base_ && pointer < base_ + kArenaBytes;
    }
    UNSEEN uint32_t offset_of(const void* pointer) const {
        return static_cast<uint32_t>(static_cast<const char*>(pointer) - base_);
    }
    UNSEEN char* at(uint32_t offset) const { return base_ + offset; }

    // In words.
    void describe(const void* pointer, char* text, size_t text_bytes) const {
        const size_t offset = offset_of(pointer);
        for (int i = 0; i < count_; ++i) {
            const Array& array = arrays_[i];
            if (offset < array.offset || offset >= end_of(array)) continue;
            const SharedDeclaration& declared = *array.declaration;
            snprintf(text, text_bytes, "%s %zu of '%s'", i == 0 ? "byte" : "element",
                     (offset - array.offset) / declared.element_bytes, declared.name);
            return;
        }
        snprintf(text, text_bytes, "shared memory outside of all arrays");
    }

    // A write out of bounds: the array that lies nearest, and the byte, counted from the array's
    // start.
    struct Damage {
        const SharedDeclaration* declaration;
        size_t bytes;
        long at;
    };
    bool find_damage(Damage& damage) const {
#ifndef __SANITIZE_ADDRESS__                 // which stops at the write itself
        for (int i = 0; i <= count_; ++i) {  // the guard before array i, or after the last one
            const size_t begin = i == 0 ? kDynamicOffset - kGuardBytes : end_of(arrays_[i - 1]);
            const size_t end = i == count_ ? end_ : arrays_[i].offset;
            if (memcmp(base_ + begin, pattern_ + begin % 2, end - begin) != 0) {
                describe(i, begin, end, damage);
                return true;
            }
        }
#endif
        return false;
    }

  private:
    struct Array {
        const SharedDeclaration* declaration;
        size_t offset, bytes;
    };
    static constexpr SharedDeclaration kDynamic = {"dynamic shared memory", 0, 1};
    static constexpr size_t kDynamicOffset = 1024;
    static constexpr size_t kGuardBytes = 256;
    static constexpr int kMaxArrays = 64;
    static_assert(kDynamicOffset + kSharedLimit + kMaxArrays * (kGuardBytes + 16) <= kArenaBytes);

    static size_t end_of(const Array& array) { return array.offset + array.bytes; }

    void add(const SharedDeclaration* declaration, size_t bytes) {
        arrays_[count_++] = {declaration, end_, bytes};
        memset(base_ + end_, 0xFF, bytes);
        end_ += bytes;
        add_guard();
    }
    // Up to the next multiple of 16, where an array may begin. The pattern, 0x7FC5 throughout, is a
    // NaN as float, bf16 and fp16.
    void add_guard() {
        const size_t begin = end_;
        end_ = (begin + kGuardBytes + 15) / 16 * 16;
        memcpy(base_ + begin, pattern_ + begin % 2, end_ - begin);
        forbid(base_ + begin, end_ - begin);
    }
    void describe(int guard, size_t begin, size_t end, Damage& damage) const {
        size_t first = begin, last = end - 1;
        while (base_[first] == pattern_[first % 2]) ++first;
        while (base_[last] == pattern_[last % 2]) --last;
        const bool past_end = guard > 0 && (guard == count_ || first - begin <= end - 1 - last);
        const Array& array = arrays_[past_end ? guard - 1 : guard];
        // The number that was written begins at a multiple of 4; its first byte may be the
        // pattern's.
        first = first / 4 * 4 > begin ? first / 4 * 4 : begin;
        last = last / 4 * 4;
        damage = {array.declaration, array.bytes,
                  static_cast<long>(past_end ? first : last) - static_cast<long>(array.offset)};
    }

    char* base_;
    size_t end_ = 0, static_bytes_ = 0, dynamic_bytes_ = 0;
    int count_ = 0;
    Array arrays_[kMaxArrays];
    char pattern_[kGuardBytes + 32];
};

}  // namespace cpu
