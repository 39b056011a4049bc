// The C interface: what __init__.py calls.
#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "adamw.h"
#include "pool.h"

#define EXPORTED __attribute__((visibility("default")))

namespace {

using megatrain::Pool;
using megatrain::Run;
using megatrain::Step;

// Elements that a thread takes at a time: 288 or 416 KiB of hi/lo state. Small enough to share a unit out evenly and to
// make up for a thread that is kept waiting, large enough that prefetching across its end costs nothing.
constexpr int64_t kPiece = 16384;

Step step_of(int isa) {
#if defined(__x86_64__)
    if (isa == megatrain::kAvx512) return megatrain::step_avx512;
    if (isa == megatrain::kAvx2) return megatrain::step_avx2;
#endif
    (void)isa;
    return megatrain::step_scalar;
}

// While one lives, its thread rounds to nearest and keeps denormals, whatever a library has switched on in it.
class PlainArithmetic {
#if defined(__x86_64__)
   public:
    PlainArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(kPowerOn); }
    ~PlainArithmetic() { _mm_setcsr(before_); }

   private:
    static constexpr unsigned kPowerOn = 0x1f80;  // MXCSR at reset: no traps, to nearest, denormals kept
    const unsigned before_;
#endif
};

// One update of several runs. Pieces are numbered through all runs and handed out one by one, so that a thread that
// is kept waiting holds up nobody.
struct Update {
    Step step;
    const Run* runs;
    int64_t count;
    std::atomic<int64_t> next{0};
};

void take_pieces(void* context) {
    [[maybe_unused]] const PlainArithmetic plain;
    Update& update = *static_cast<Update*>(context);
    int64_t i = 0, before = 0;  // the current run, pieces of the runs before it
    for (;;) {
        const int64_t piece = update.next.fetch_add(1, std::memory_order_relaxed);
        for (;; ++i) {
            if (i == update.count) return;
            const int64_t pieces = (update.runs[i].n + kPiece - 1) / kPiece;
            if (piece < before + pieces) break;
            before += pieces;
        }
        const Run& run = update.runs[i];
        const int64_t begin = (piece - before) * kPiece;
        update.step(run, begin, begin + kPiece < run.n ? begin + kPiece : run.n);
    }
}

}  // namespace

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

// Null when out of memory.
EXPORTED void* megatrain_pool_create(int threads) { return Pool::create(threads); }

// Threads that could be had.
EXPORTED int megatrain_pool_threads(const void* pool) { return static_cast<const Pool*>(pool)->threads(); }

EXPORTED void megatrain_pool_destroy(void* pool) { Pool::destroy(static_cast<Pool*>(pool)); }

// Update every run by path `isa`; returns when all is done.
EXPORTED void megatrain_adamw(void* pool, int isa, const Run* runs, int64_t count) {
    Update update{step_of(isa), runs, count};
    static_cast<Pool*>(pool)->run(take_pieces, &update);
}

}  // extern "C"
