// What the pieces of the kernel share. Plain C at the border: see abi.cpp and __init__.py.
#pragma once

#include <cstdint>

namespace megatrain {

constexpr int kAbi = 2;  // ABI of __init__.py

// Consecutive elements that share every factor. Mirrors Run of __init__.py.
struct Run {
    void* weights;     // low ? bf16 high halves : fp32
    int16_t* low;      // low halves, or null
    void* exp_avg;     // bf16_moments ? bf16 : fp32
    void* exp_avg_sq;
    const void* grad;  // low ? bf16 : fp32; never written
    int64_t n;
    uint32_t bf16_moments;
    uint32_t first, key0, key1;  // what bf16 moments are rounded with: Draws of rounding.py
    float clip, keep, lerp, beta2, square, bias2_sqrt, eps, neg_step;
};

enum Isa { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };  // Isa of __init__.py

// Update elements [begin, end) of a run. One definition per instruction path, each in a file of its own because
// each is compiled with its own target flags.
using Step = void (*)(const Run& run, int64_t begin, int64_t end);
void step_scalar(const Run& run, int64_t begin, int64_t end);
#if defined(__x86_64__)
void step_avx2(const Run& run, int64_t begin, int64_t end);
void step_avx512(const Run& run, int64_t begin, int64_t end);
#endif

}  // namespace megatrain
