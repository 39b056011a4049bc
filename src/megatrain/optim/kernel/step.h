// The update itself, once, over "lanes": a vector register of a path, or one float.
//
// Included by each step_*.cpp, which is compiled for its own instruction set. Everything is in an unnamed namespace:
// the linker must never merge a function of one path into another.
//
// definition.py states the arithmetic. Contractions are written out (fma); the compiler adds none (-ffp-contract=off).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "adamw.h"

namespace megatrain {
namespace {

constexpr int64_t kTorchLanes = 8;  // definition.py: the last n % 8 elements contract the other way
constexpr int64_t kAhead = 512;     // elements of prefetch: 1 KiB ahead in 16-bit streams, 2 KiB in fp32 ones

struct ScalarLanes {
    using Float = float;
    static constexpr int64_t width = 1;
    static Float fill(float x) { return x; }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float negative(Float a) { return -a; }
    static Float sqrt(Float a) { return std::sqrt(a); }
    static Float fma(Float a, Float b, Float c) { return std::fma(a, b, c); }
    static Float load(const float* p) { return *p; }
    static void store(float* p, Float x) { *p = x; }
    static Float load_bf16(const uint16_t* p) { return from_bits(static_cast<uint32_t>(*p) << 16); }
    static Float load_halves(const uint16_t* high, const int16_t* low) {
        return from_bits((static_cast<uint32_t>(*high) << 16) + static_cast<uint32_t>(static_cast<int32_t>(*low)));
    }
    static void store_halves(uint16_t* high, int16_t* low, Float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        *high = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        *low = static_cast<int16_t>(static_cast<uint16_t>(bits));
    }

   private:
    static float from_bits(uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
};

// How weights and gradients lie in memory.
struct Halves {
    template <class L>
    static typename L::Float weight(const Run& r, int64_t i) {
        return L::load_halves(static_cast<const uint16_t*>(r.weights) + i, r.low + i);
    }
    template <class L>
    static void keep_weight(const Run& r, int64_t i, typename L::Float x) {
        L::store_halves(static_cast<uint16_t*>(r.weights) + i, r.low + i, x);
    }
    template <class L>
    static typename L::Float grad(const Run& r, int64_t i) {
        return L::load_bf16(static_cast<const uint16_t*>(r.grad) + i);
    }
};

struct Full {
    template <class L>
    static typename L::Float weight(const Run& r, int64_t i) {
        return L::load(static_cast<const float*>(r.weights) + i);
    }
    template <class L>
    static void keep_weight(const Run& r, int64_t i, typename L::Float x) {
        L::store(static_cast<float*>(r.weights) + i, x);
    }
    template <class L>
    static typename L::Float grad(const Run& r, int64_t i) {
        return L::load(static_cast<const float*>(r.grad) + i);
    }
};

enum class Contraction { kVector, kTail };
enum class Lerp { kFromAverage, kFromGradient };  // beta1 > 0.5, or not: the end that is nearer, as in torch

// L::width elements at i.
template <class L, class Format, Lerp lerp, Contraction contraction>
inline __attribute__((always_inline)) void update(const Run& r, int64_t i) {
    using F = typename L::Float;
    const F grad = L::mul(Format::template grad<L>(r, i), L::fill(r.clip));
    const F weight = L::mul(Format::template weight<L>(r, i), L::fill(r.keep));

    const F average = L::load(r.exp_avg + i);
    const F away = L::sub(grad, average);
    // The third differs from the second in the sign of a zero only.
    const F m = lerp == Lerp::kFromAverage            ? L::fma(L::fill(r.lerp), away, average)
                : contraction == Contraction::kVector ? L::fma(L::fill(r.lerp - 1.0f), away, grad)
                                                      : L::fma(L::fill(1.0f - r.lerp), L::negative(away), grad);
    L::store(r.exp_avg + i, m);

    const F square = L::load(r.exp_avg_sq + i);
    const F part = L::mul(L::fill(r.square), grad);
    const F v = contraction == Contraction::kVector ? L::fma(part, grad, L::mul(square, L::fill(r.beta2)))
                                                    : L::fma(square, L::fill(r.beta2), L::mul(part, grad));
    L::store(r.exp_avg_sq + i, v);

    const F denominator = L::add(L::div(L::sqrt(v), L::fill(r.bias2_sqrt)), L::fill(r.eps));
    const F move = L::div(L::mul(L::fill(r.neg_step), m), denominator);
    Format::template keep_weight<L>(r, i, L::add(weight, move));
}

inline __attribute__((always_inline)) void prefetch(const void* base, int64_t bytes) {
    // An address beyond the array is fine: a prefetch never faults.
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(bytes)));
}

// The streams of 32 elements, `kAhead` elements from i: 64 bytes of each 16-bit stream, 128 of each fp32 one.
template <class Format>
inline __attribute__((always_inline)) void prefetch_all(const Run& r, int64_t i) {
    const int64_t at = i + kAhead;
    constexpr int64_t width = std::is_same<Format, Halves>::value ? 2 : 4;
    for (int64_t line = 0; line < 32 * width; line += 64) {
        prefetch(r.weights, at * width + line);
        prefetch(r.grad, at * width + line);
    }
    if (width == 2) prefetch(r.low, at * 2);
    for (int64_t line = 0; line < 128; line += 64) {
        prefetch(r.exp_avg, at * 4 + line);
        prefetch(r.exp_avg_sq, at * 4 + line);
    }
}

template <class L, class Format, Lerp lerp>
void step_range(const Run& r, int64_t begin, int64_t end) {
    const int64_t tail = r.n - r.n % kTorchLanes;
    const int64_t body = end < tail ? end : tail;
    int64_t i = begin;
    for (; i + 32 <= body; i += 32) {
        prefetch_all<Format>(r, i);
        for (int64_t k = 0; k < 32; k += L::width) update<L, Format, lerp, Contraction::kVector>(r, i + k);
    }
    for (; i + L::width <= body; i += L::width) update<L, Format, lerp, Contraction::kVector>(r, i);
    for (; i < body; ++i) update<ScalarLanes, Format, lerp, Contraction::kVector>(r, i);
    for (; i < end; ++i) update<ScalarLanes, Format, lerp, Contraction::kTail>(r, i);
}

template <class L>
void step_lanes(const Run& r, int64_t begin, int64_t end) {
    const bool near_average = std::fabs(r.lerp) < 0.5f;
    if (r.low != nullptr) {
        near_average ? step_range<L, Halves, Lerp::kFromAverage>(r, begin, end)
                     : step_range<L, Halves, Lerp::kFromGradient>(r, begin, end);
    } else {
        near_average ? step_range<L, Full, Lerp::kFromAverage>(r, begin, end)
                     : step_range<L, Full, Lerp::kFromGradient>(r, begin, end);
    }
}

}  // namespace
}  // namespace megatrain
