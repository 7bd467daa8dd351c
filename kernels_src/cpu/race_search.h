// How races.h searches: see there.
#pragma once

#include "races.h"

namespace [[gnu::visibility("hidden")]] cpu {

inline Races::Races(Grid& grid, Block** blocks)
    : grid_(grid),
      blocks_(blocks),
      size_(grid.threads.x * grid.threads.y * grid.threads.z),
      os_stack_(static_cast<const char*>(__builtin_frame_address(0))),
      os_variables_(reinterpret_cast<const char*>(&current_thread)),
      clocks_(size_, grid.cluster) {
    for (int rank = 0; rank < grid.cluster; ++rank) {
        cells_[rank] = static_cast<Cell*>(calloc(SharedMemory::kArenaBytes, sizeof(Cell)));
        if (grid.cluster > 1) last_visits_[rank].resize(size_ * grid.cluster);
    }
}

inline Races::~Races() {
    forget_held();
    for (int rank = 0; rank < grid_.cluster; ++rank) free(cells_[rank]);
    for (auto& entry : pages_) free(entry.second);
}

// The log of global memory goes on.
inline void Races::begin() {
    for (int rank = 0; rank < grid_.cluster; ++rank) {
        memset(cells_[rank], 0, used_cells_[rank] * sizeof(Cell));
        used_cells_[rank] = 0;
        indices_.push_back(blocks_[rank]->index);
        blocks_[rank]->races = this;
    }
    ++cluster_;
    shared_log_.clear();
    signals_.clear();
    unfenced_.clear();
    forget_held();
    clocks_.settle();
    begun_at_ = clocks_.now(0);
}

// Until now another thread might have written what was read unwritten, which is a race.
inline void Races::end() {
    for (int rank = 0; rank < grid_.cluster; ++rank) {
        for (const Access& last : last_visits_[rank]) {
            if (last.cluster != cluster_ || clocks_.is_seen_in(rank, last.thread, last.time))
                continue;
            blocks_[last.thread / size_]->report(
                thread_of(last), line_of(last),
                "%.*s uses shared memory of block (%u,%u,%u), which may have ended; put "
                "cluster_sync() after the use",
                name_length(), grid_.text, blocks_[rank]->index.x, blocks_[rank]->index.y,
                blocks_[rank]->index.z);
            return;
        }
    }
    if (!unwritten_.at) return;
    const Access& own = unwritten_.own;
    char what[160];
    describe(unwritten_.at, what);
    blocks_[own.thread / size_]->report(thread_of(own), line_of(own),
                                        "%.*s reads %s, which no thread had written before",
                                        name_length(), grid_.text, what);
}

// ---- accesses

UNSEEN inline void Races::access(const Visit& visit, const void* address, size_t bytes) {
    const char* at = static_cast<const char*>(address);
    int rank;
    if (const SharedMemory* shared = shared_with(at, rank)) {
        if (rank != visit.rank) visit_other_block(visit, rank);
        const size_t offset = shared->offset_of(at);
        if (used_cells_[rank] < offset + bytes) used_cells_[rank] = offset + bytes;
        return access_cells(visit, cells_[rank] + offset, at, bytes, true);
    }
    if (belongs_to_os_thread(at)) return;
    for (size_t part; bytes > 0; at += part, bytes -= part) {
        const uintptr_t place = reinterpret_cast<uintptr_t>(at) % kPage;
        part = bytes < kPage - place ? bytes : kPage - place;
        access_cells(visit, page_of(at) + place, at, part, false);
    }
}

UNSEEN inline void Races::visit_other_block(const Visit& visit, int rank) {
    Access& last = last_visits_[rank][visit.access.thread];
    if (last.cluster != cluster_ && !clocks_.has_heard_from(visit.clock, rank, begun_at_)) {
        const uint3 index = blocks_[rank]->index;
        current_block->fail(
            thread_of(visit.access), line_of(visit.access),
            "%.*s uses shared memory of block (%u,%u,%u), which may not have begun; "
            "put cluster_sync() before the use",
            name_length(), grid_.text, index.x, index.y, index.z);
    }
    last = visit.access;
    if (last.agent == Agent::BulkCopy) last.time = 0;  // a thread of the block waits for it
}

UNSEEN inline Cell* Races::page_of(const void* address) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(address) / kPage;
    auto& recent = recent_pages_[page % 64];
    if (recent.page != page) {
        Cell*& cells = pages_[page];
        if (!cells) cells = static_cast<Cell*>(calloc(kPage, sizeof(Cell)));
        recent = {page, cells};
    }
    return recent.cells;
}

UNSEEN inline void Races::access_cells(const Visit& visit, Cell* cells, const char* at,
                                       size_t bytes, bool shared) {
    Log& log = shared ? shared_log_ : global_log_;
    const Access& own = visit.access;
    uint32_t own_write = 0, before = 0, with = 0, passed[3] = {};
    Cell found{}, left{};  // at the byte before
    for (size_t i = 0; i < bytes; ++i) {
        Cell& cell = cells[i];
        if (i > 0 && cell == found) {  // most often, for numbers are read and written whole
            cell = left;
            continue;
        }
        found = cell;
        const uint32_t lists[] = {cell.write, own.kind == Kind::Atomic ? 0 : cell.atomics,
                                  own.kind == Kind::Read ? 0 : cell.reads};
        for (int list = 0; list < 3; ++list) {
            if (lists[list] == passed[list]) continue;
            for (uint32_t other = lists[list]; other; other = log[other].before) {
                const Access& earlier = log[other];
                if (!allowed(earlier, visit) && !is_repeated(earlier, visit, at, bytes)) {
                    report(own, earlier, at + i, ordered(earlier, visit));
                }
            }
            passed[list] = lists[list];
        }
        if (own.kind == Kind::Write) {
            if (!own_write) own_write = log.find_or_add(own);
            left = cell = {own_write, 0, 0};
            continue;
        }
        if (shared && own.agent == Agent::Thread && !cell.write && !cell.atomics &&
            !unwritten_.at) {
            unwritten_.own = own;
            unwritten_.at = at + i;
        }
        uint32_t& accesses = own.kind == Kind::Read ? cell.reads : cell.atomics;
        if (!with || accesses != before) {
            before = accesses;
            with = with_visit(before, own, shared);
        }
        accesses = with;
        left = cell;
    }
}

UNSEEN inline bool Races::allowed(const Access& earlier, const Visit& visit) const {
    const Agent own = visit.access.agent, other = earlier.agent;
    const bool needs_fence = (own == Agent::BulkCopy || own == Agent::Product) &&
                             (other == Agent::Thread || other == Agent::Copy) &&
                             earlier.kind == Kind::Write;
    return ordered(earlier, visit) &&
           (!needs_fence || clocks_.has_seen_past_fence(visit.clock, earlier.thread, earlier.time));
}

// Whether a thread of the same block wrote there in the same line. Then the value must be the same,
// which is seen once it has been written.
UNSEEN inline bool Races::is_repeated(const Access& earlier, const Visit& visit, const char* at,
                                      size_t bytes) {
    const Access& own = visit.access;
    if (own.kind != Kind::Write || earlier.kind != Kind::Write || own.agent != Agent::Thread ||
        earlier.agent != Agent::Thread || earlier.cluster != own.cluster ||
        earlier.thread / size_ != own.thread / size_ || bytes > sizeof repeated_.bytes ||
        !(line_of(earlier) == line_of(own))) {
        return false;
    }
    repeated_.own = own;
    repeated_.earlier = earlier;
    repeated_.at = at;
    repeated_.count = bytes;
    memcpy(repeated_.bytes, at, bytes);
    current_thread->repeated = true;
    return true;
}

UNSEEN inline void Races::check_repeated() {
    current_thread->repeated = false;
    if (memcmp(repeated_.bytes, repeated_.at, repeated_.count) != 0) {
        report(repeated_.own, repeated_.earlier, repeated_.at, false);
    }
}

UNSEEN inline void Block::check_repeated() {
    if (current_thread->repeated) current_block->races->check_repeated();
}

// The list of reads or atomics `before`, and this one.
UNSEEN inline uint32_t Races::with_visit(uint32_t before, Access access, bool shared) {
    Log& log = shared ? shared_log_ : global_log_;
    const Access last = log[before];
    const bool of_cluster = last.cluster == cluster_;
    if (before && of_cluster && last.thread == access.thread && last.time == access.time) {
        return before;
    }
    access.before = before;
    if (shared) {
        if (clocks_.all_have_seen(last.latest)) access.before = 0;
    } else if (before && of_cluster) {
        access.before = last.before;
    } else if (before && last.before) {
        Access alone = last;
        alone.before = 0;
        access.before = log.find_or_add(alone);
    }
    access.latest = access.before && access.time < last.latest ? last.latest : access.time;
    return log.find_or_add(access);
}

// Ends the launch with a sentence about both.
inline void Races::report(const Access& own, const Access& earlier, const char* at, bool ordered) {
    char what[160];
    describe(at, what);
    const uint3 other = thread_of(earlier).index;
    const uint3 block = indices_[(earlier.cluster - 1) * grid_.cluster + earlier.thread / size_];
    const Site site = line_of(earlier);
    current_block->fail(thread_of(own), line_of(own),
                        "a race in %.*s: it %s %s, which thread (%u,%u,%u) of block (%u,%u,%u) %s "
                        "at %s:%d, and nothing orders the two; %s",
                        name_length(), grid_.text, verb_of(own), what, other.x, other.y, other.z,
                        block.x, block.y, block.z, verb_of(earlier), site.file, site.line,
                        advice(own, earlier, ordered, size_));
}

// An unrolled loop has many addresses in one line.
inline Site Races::line_of(const Access& access) {
    auto [found, is_new] = lines_.try_emplace({access.site.file, access.site.line});
    if (is_new) found->second = in_source(access.site, grid_.site);
    return found->second;
}

inline void Races::describe(const char* at, char (&text)[160]) const {
    int rank;
    if (const SharedMemory* shared = shared_with(at, rank)) {
        shared->describe(at, text, sizeof text);
    } else {
        snprintf(text, sizeof text, "global memory at %p", static_cast<const void*>(at));
    }
}

}  // namespace cpu
