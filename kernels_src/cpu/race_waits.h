// What races.h knows of that which is waited for: the registers of a wgmma, and mbarriers.
#pragma once

#include "races.h"

namespace [[gnu::visibility("hidden")]] cpu {

// ---- registers

UNSEEN inline void Races::hold(const void* array, size_t bytes, bool may_be_read, Site site) {
    const char* start = static_cast<const char*>(array);
    auto [held, is_new] = held_.try_emplace(start, Held{start + bytes, 0, may_be_read, site});
    ++held->second.products;
    if (!is_new) return;
    Thread& thread = *current_thread;
    const char* end = start + bytes;
    thread.held_begin = thread.held > 0 && thread.held_begin < start ? thread.held_begin : start;
    thread.held_end = thread.held > 0 && thread.held_end > end ? thread.held_end : end;
    ++thread.held;
    __atomic_add_fetch(&held_arrays, 1, __ATOMIC_RELAXED);
}

UNSEEN inline void Races::release(const void* array) {
    const auto held = held_.find(static_cast<const char*>(array));
    if (held == held_.end() || --held->second.products > 0) return;
    held_.erase(held);
    --current_thread->held;
    __atomic_sub_fetch(&held_arrays, 1, __ATOMIC_RELAXED);
}

// Of threads that ended, or were ended, before they waited.
inline void Races::forget_held() {
    __atomic_sub_fetch(&held_arrays, int(held_.size()), __ATOMIC_RELAXED);
    held_.clear();
}

UNSEEN inline void Races::check_held(Kind kind, Site site, const void* address) {
    const Quiet quiet;
    auto after = held_.upper_bound(static_cast<const char*>(address));
    if (after == held_.begin()) return;
    const Held& held = std::prev(after)->second;
    if (address >= held.end || (held.may_be_read && kind == Kind::Read)) return;
    const Access access = by(*current_thread, kind, site).access;
    current_block->fail(*current_thread, line_of(access),
                        "%.*s %s registers that the wgmma at %s:%d uses until wgmma_wait",
                        name_length(), grid_.text, verb_of(access), held.site.file, held.site.line);
}

// ---- mbarriers

UNSEEN inline Signal& Races::signal(const void* barrier) {
    Signal& of = signals_[barrier];
    of.arrived.resize(clocks_.length());
    of.ended.resize(clocks_.length());
    return of;
}

inline void Races::init(const void* barrier, Site site) {
    access(by(*current_thread, Kind::Write, site), barrier, sizeof(uint64_t));
    unfenced_.push_back(
        cells_[current_block->rank][current_block->shared.offset_of(barrier)].write);
}

inline void Races::fence_inits() {
    for (const uint32_t write : unfenced_) shared_log_[write].agent = Agent::Barrier;
    unfenced_.clear();
    clocks_.advance(number_of(*current_thread));
}

UNSEEN inline void Races::arrive(const void* barrier, Site site) {
    access(by(*current_thread, Kind::Atomic, site), barrier, sizeof(uint64_t));
    clocks_.give(number_of(*current_thread), signal(barrier).arrived.data());
}

UNSEEN inline void Races::expect(const void* barrier, Flight flight, Site site) {
    access(by(*current_thread, Kind::Atomic, site, Agent::BulkCopy), barrier, sizeof(uint64_t));
    signal(barrier).under_way.push_back(flight);
}

UNSEEN inline void Races::end_phase(const void* barrier) {
    Signal& of = signal(barrier);
    clocks_.add(of.ended.data(), of.arrived.data());
    of.landed.insert(of.landed.end(), of.under_way.begin(), of.under_way.end());
    of.under_way.clear();
}

// The current thread has seen that a phase ended. The first to do so lands its copies, and passes
// that on.
UNSEEN inline void Races::wait(const void* barrier, Site site) {
    access(by(*current_thread, Kind::Atomic, site), barrier, sizeof(uint64_t));
    Signal& of = signal(barrier);
    const uint32_t number = number_of(*current_thread);
    clocks_.take(number, of.ended.data());
    if (of.landed.empty()) return;
    for (const Flight& flight : of.landed) land(flight);
    of.landed.clear();
    of.ended[number] = clocks_.now(number);
    clocks_.advance(number);
}

}  // namespace cpu
