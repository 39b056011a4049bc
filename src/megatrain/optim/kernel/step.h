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

constexpr uint32_t kMagnitude = 0x7fffffff;    // all but the sign
constexpr uint32_t kLargestBf16 = 0x7f7f0000;  // the largest finite one, as fp32 bits

struct ScalarLanes {
    using Float = float;
    using Word = uint32_t;
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
    static Word fill_word(uint32_t x) { return x; }
    static Word count_from(uint32_t x) { return x; }  // x, x + 1, ... one for each lane
    static Word plus(Word a, Word b) { return a + b; }
    static Word times(Word a, Word b) { return a * b; }
    static Word exclusive_or(Word a, Word b) { return a ^ b; }
    static Word low_half(Word a) { return a & 0xffffu; }
    template <int places>
    static Word shift(Word a) {
        return a >> places;
    }
    // The high half of the bits of x + random, or of x alone from the largest bf16 up. random is below 2^16.
    static Word rounded(Float x, Word random) {
        const uint32_t bits = bits_of(x);
        return ((bits & kMagnitude) < kLargestBf16 ? bits + random : bits) >> 16;
    }
    // Words below 2^16, two streams at once.
    static void store_words(void* p, Word a, void* q, Word b) {
        *static_cast<uint16_t*>(p) = static_cast<uint16_t>(a);
        *static_cast<uint16_t*>(q) = static_cast<uint16_t>(b);
    }
    static Float load_bf16(const uint16_t* p) { return from_bits(static_cast<uint32_t>(*p) << 16); }
    static Float load_halves(const uint16_t* high, const int16_t* low) {
        return from_bits((static_cast<uint32_t>(*high) << 16) + static_cast<uint32_t>(static_cast<int32_t>(*low)));
    }
    static void store_halves(uint16_t* high, int16_t* low, Float x) {
        const uint32_t bits = bits_of(x);
        *high = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        *low = static_cast<int16_t>(static_cast<uint16_t>(bits));
    }

   private:
    static uint32_t bits_of(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits;
    }
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

// How moments lie in memory.
struct WideMoments {
    template <class L>
    static typename L::Float load(const void* moment, int64_t i) {
        return L::load(static_cast<const float*>(moment) + i);
    }
    template <class L>
    static void keep(const Run& r, int64_t i, typename L::Float m, typename L::Float v) {
        L::store(static_cast<float*>(r.exp_avg) + i, m);
        L::store(static_cast<float*>(r.exp_avg_sq) + i, v);
    }
};

struct Bf16Moments {
    template <class L>
    static typename L::Float load(const void* moment, int64_t i) {
        return L::load_bf16(static_cast<const uint16_t*>(moment) + i);
    }
    template <class L>
    static void keep(const Run& r, int64_t i, typename L::Float m, typename L::Float v) {
        const typename L::Word random = words<L>(r, i);
        L::store_words(static_cast<uint16_t*>(r.exp_avg) + i, L::rounded(m, L::low_half(random)),
                       static_cast<uint16_t*>(r.exp_avg_sq) + i, L::rounded(v, L::template shift<16>(random)));
    }

   private:
    // The random words of elements i, i + 1, ... rounding.py says what they are.
    template <class L>
    static typename L::Word words(const Run& r, int64_t i) {
        using W = typename L::Word;
        W h = L::exclusive_or(L::count_from(r.first + static_cast<uint32_t>(i)), L::fill_word(r.key0));
        h = L::times(L::exclusive_or(h, L::template shift<16>(h)), L::fill_word(0x7feb352d));
        h = L::plus(L::exclusive_or(h, L::template shift<15>(h)), L::fill_word(r.key1));
        h = L::times(h, L::fill_word(0x846ca68b));
        return L::exclusive_or(h, L::template shift<16>(h));
    }
};

enum class Contraction { kVector, kTail };
enum class Lerp { kFromAverage, kFromGradient };  // beta1 > 0.5, or not: the end that is nearer, as in torch

template <class L>
struct NewMoments {
    typename L::Float m, v;  // in fp32, before any rounding
};

// The moments of L::width elements at i: stored and returned.
template <class L, class Format, class Moments, Lerp lerp, Contraction contraction>
inline __attribute__((always_inline)) NewMoments<L> new_moments(const Run& r, int64_t i) {
    using F = typename L::Float;
    const F grad = L::mul(Format::template grad<L>(r, i), L::fill(r.clip));
    const F before = Moments::template load<L>(r.exp_avg, i);
    const F away = L::sub(grad, before);
    // The third differs from the second in the sign of a zero only.
    const F m = lerp == Lerp::kFromAverage            ? L::fma(L::fill(r.lerp), away, before)
                : contraction == Contraction::kVector ? L::fma(L::fill(r.lerp - 1.0f), away, grad)
                                                      : L::fma(L::fill(1.0f - r.lerp), L::negative(away), grad);

    const F square = Moments::template load<L>(r.exp_avg_sq, i);
    const F part = L::mul(L::fill(r.square), grad);
    const F v = contraction == Contraction::kVector ? L::fma(part, grad, L::mul(square, L::fill(r.beta2)))
                                                    : L::fma(square, L::fill(r.beta2), L::mul(part, grad));
    Moments::template keep<L>(r, i, m, v);
    return {m, v};
}

// The weights of L::width elements at i.
template <class L, class Format>
inline __attribute__((always_inline)) void move_weight(const Run& r, int64_t i, NewMoments<L> moments) {
    using F = typename L::Float;
    const F denominator = L::add(L::div(L::sqrt(moments.v), L::fill(r.bias2_sqrt)), L::fill(r.eps));
    const F step = L::div(L::mul(L::fill(r.neg_step), moments.m), denominator);
    const F weight = L::mul(Format::template weight<L>(r, i), L::fill(r.keep));
    Format::template keep_weight<L>(r, i, L::add(weight, step));
}

template <class L, class Format, class Moments, Lerp lerp, Contraction contraction>
inline __attribute__((always_inline)) void update(const Run& r, int64_t i) {
    move_weight<L, Format>(r, i, new_moments<L, Format, Moments, lerp, contraction>(r, i));
}

inline __attribute__((always_inline)) void prefetch(const void* base, int64_t bytes) {
    // An address beyond the array is fine: a prefetch never faults.
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(bytes)));
}

// 32 elements of `width` bytes, from number `at` of a stream.
template <int64_t width>
inline __attribute__((always_inline)) void prefetch_32(const void* base, int64_t at) {
    for (int64_t line = 0; line < 32 * width; line += 64) prefetch(base, at * width + line);
}

// Every stream of 32 elements, `kAhead` elements from i.
template <class Format, class Moments>
inline __attribute__((always_inline)) void prefetch_all(const Run& r, int64_t i) {
    constexpr int64_t weight = std::is_same<Format, Halves>::value ? 2 : 4;
    constexpr int64_t moment = std::is_same<Moments, Bf16Moments>::value ? 2 : 4;
    const int64_t at = i + kAhead;
    prefetch_32<weight>(r.weights, at);
    prefetch_32<weight>(r.grad, at);
    if (weight == 2) prefetch_32<2>(r.low, at);
    prefetch_32<moment>(r.exp_avg, at);
    prefetch_32<moment>(r.exp_avg_sq, at);
}

template <class L, class Format, class Moments, Lerp lerp>
void step_range(const Run& run, int64_t begin, int64_t end) {
    const Run r = run;  // our own: no store into the streams can change it, so it is read once
    const int64_t tail = r.n - r.n % kTorchLanes;
    const int64_t body = end < tail ? end : tail;
    int64_t i = begin;
    for (; i + 32 <= body; i += 32) {
        prefetch_all<Format, Moments>(r, i);
        // All moments first: the divisions, which take long, then run while the next 32 begin.
        NewMoments<L> moments[32 / L::width];
#pragma GCC unroll 4
        for (int64_t k = 0; k < 32 / L::width; ++k) {
            moments[k] = new_moments<L, Format, Moments, lerp, Contraction::kVector>(r, i + k * L::width);
        }
#pragma GCC unroll 4
        for (int64_t k = 0; k < 32 / L::width; ++k) move_weight<L, Format>(r, i + k * L::width, moments[k]);
    }
    for (; i + L::width <= body; i += L::width) update<L, Format, Moments, lerp, Contraction::kVector>(r, i);
    for (; i < body; ++i) update<ScalarLanes, Format, Moments, lerp, Contraction::kVector>(r, i);
    for (; i < end; ++i) update<ScalarLanes, Format, Moments, lerp, Contraction::kTail>(r, i);
}

template <class L, class Format, class Moments>
void step_with(const Run& r, int64_t begin, int64_t end) {
    std::fabs(r.lerp) < 0.5f ? step_range<L, Format, Moments, Lerp::kFromAverage>(r, begin, end)
                             : step_range<L, Format, Moments, Lerp::kFromGradient>(r, begin, end);
}

template <class L>
void step_lanes(const Run& r, int64_t begin, int64_t end) {
    if (r.low != nullptr) {
        r.bf16_moments ? step_with<L, Halves, Bf16Moments>(r, begin, end)
                       : step_with<L, Halves, WideMoments>(r, begin, end);
    } else {
        r.bf16_moments ? step_with<L, Full, Bf16Moments>(r, begin, end)
                       : step_with<L, Full, WideMoments>(r, begin, end);
    }
}

}  // namespace
}  // namespace megatrain
