// The words of a race: what each access did, where in the source it stands, and what to do.
#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "access.h"

namespace [[gnu::visibility("hidden")]] cpu {

inline const char* verb_of(const Access& access) {
    switch (access.agent) {
        case Agent::Copy:
            return "copies asynchronously into";
        case Agent::BulkCopy:
            return "copies in bulk into";
        case Agent::Product:
            return "multiplies by wgmma from";
        default:
            break;
    }
    return access.kind == Kind::Atomic  ? "changes atomically"
           : access.kind == Kind::Write ? "writes"
                                        : "reads";
}

// What would order an access after an earlier one of the same launch, which is not past a fence, or
// not ordered, in blocks of `size` threads.
inline const char* advice(const Access& own, const Access& earlier, bool ordered, uint32_t size) {
    if (earlier.cluster != own.cluster)
        return "blocks have no order: let one write it, or use atomics";
    if (ordered)
        return "put fence_async_proxy(), for a barrier barrier_init_fence(), after the write";
    if (earlier.time >= kInFlight) {
        if (earlier.agent == Agent::Copy) return "put copy_async_wait and a barrier between";
        if (earlier.agent == Agent::BulkCopy)
            return "put barrier_wait of the copy's barrier between";
        return "put wgmma_wait and a barrier between";
    }
    if (own.thread / size != earlier.thread / size) return "put cluster_sync() between";
    if (own.thread / kLanes != earlier.thread / kLanes) {
        return "put __syncthreads() or another barrier of both between";
    }
    return "put __syncthreads() between, or __syncwarp() where no other warp shares it";
}

// File and line of a site in a kernel, which may be an address in the code. Of a function of the
// headers that was inlined, it is the line in the kernel's own source.
inline Site in_source(Site site, Site launch) {
    constexpr size_t kFolder = sizeof __FILE__ - sizeof "cpu/race_report.h";
    const char* code = site.file - 1;  // the call, before where it returns to
    Dl_info library;
    if (site.line > 0 || !dladdr(code, &library)) return site;
    const size_t offset = code - static_cast<const char*>(library.dli_fbase);
    char text[1024];
    snprintf(text, sizeof text, "addr2line -i -e '%s' 0x%zx", library.dli_fname, offset);
    FILE* frames = popen(text, "r");  // innermost first
    Site found{library.dli_fname, int(offset)};
    for (bool in_header = true; in_header && frames && fgets(text, sizeof text, frames);) {
        char* colon = strrchr(text, ':');
        if (!colon || atoi(colon + 1) == 0) continue;
        *colon = 0;
        // Of a library's first function addr2line names the file that was compiled, and not that of
        // its #line.
        const bool is_compiled_file = strstr(text, __BASE_FILE__);
        found = {is_compiled_file ? launch.file : strdup(text), atoi(colon + 1)};
        in_header = strncmp(text, __FILE__, kFolder) == 0 &&
                    (strncmp(text + kFolder, "cpu/", 4) == 0 || !strchr(text + kFolder, '/'));
    }
    if (frames) pclose(frames);
    return found;
}

}  // namespace cpu
