// The C interface: what __init__.py calls.
#include <algorithm>
#include <atomic>
#include <vector>

#include "adamw.h"
#include "pool.h"

namespace {

using megatrain::Run;

// Elements that a thread takes at a time: 416 KiB of hi/lo state. Small enough to share a unit out evenly and to
// make up for a thread that is kept waiting, large enough that prefetching across its end costs nothing.
constexpr int64_t kPiece = 16384;

megatrain::Step step_of(int isa) {
#if defined(__x86_64__)
    if (isa == megatrain::kAvx512) return megatrain::step_avx512;
    if (isa == megatrain::kAvx2) return megatrain::step_avx2;
#endif
    return megatrain::step_scalar;
}

struct Handle {
    Handle(int threads, int isa) : pool(threads), step(step_of(isa)) {}
    megatrain::Pool pool;
    const megatrain::Step step;
};

int64_t pieces_of(const Run& run) { return (run.n + kPiece - 1) / kPiece; }

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED int megatrain_abi() { return megatrain::kAbi; }

// Bit i is set if path i (enum Isa) can run here.
EXPORTED unsigned megatrain_isas() {
    unsigned found = 1u << megatrain::kScalar;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 1u << megatrain::kAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma")) found |= 1u << megatrain::kAvx512;
#endif
    return found;
}

EXPORTED void* megatrain_pool_create(int threads, int isa) { return new Handle(threads, isa); }

// Threads that could be had.
EXPORTED int megatrain_pool_threads(const void* handle) { return static_cast<const Handle*>(handle)->pool.threads(); }

EXPORTED void megatrain_pool_destroy(void* handle) { delete static_cast<Handle*>(handle); }

// Update every run. Pieces are handed out one by one, so a thread that is kept waiting holds up nobody.
EXPORTED void megatrain_adamw(void* handle, const Run* runs, int64_t count) {
    Handle& self = *static_cast<Handle*>(handle);
    std::vector<int64_t> ends;  // pieces up to and including run i
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) ends.push_back(total += pieces_of(runs[i]));
    std::atomic<int64_t> next{0};
    self.pool.run([&] {
        for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
            const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), piece) - ends.begin());
            const int64_t begin = (piece - (ends[i] - pieces_of(runs[i]))) * kPiece;
            self.step(runs[i], begin, std::min(begin + kPiece, runs[i].n));
        }
    });
}

}  // extern "C"
