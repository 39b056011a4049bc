// Eight elements at a time. Compiled with -mavx2 -mfma, called only where the CPU has both.
#if defined(__x86_64__)

#include <immintrin.h>

#include "step.h"

namespace megatrain {
namespace {

struct Avx2Lanes {
    using Float = __m256;
    using Word = __m256i;
    static constexpr int64_t width = 8;
    static Float fill(float x) { return _mm256_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float negative(Float a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
    static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
    static Word fill_word(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static Word count_from(uint32_t x) {
        return _mm256_add_epi32(fill_word(x), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static Word plus(Word a, Word b) { return _mm256_add_epi32(a, b); }
    static Word times(Word a, Word b) { return _mm256_mullo_epi32(a, b); }
    static Word exclusive_or(Word a, Word b) { return _mm256_xor_si256(a, b); }
    static Word low_half(Word a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xffff)); }
    template <int places>
    static Word shift(Word a) {
        return _mm256_srli_epi32(a, places);
    }
    static Word rounded(Float x, Word random) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i magnitude = _mm256_and_si256(bits, fill_word(kMagnitude));  // as signed numbers: none is negative
        const __m256i rounds = _mm256_cmpgt_epi32(fill_word(kLargestBf16), magnitude);
        return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_and_si256(random, rounds)), 16);
    }
    // Packing works within 128-bit halves: a0-3 b0-3 a4-7 b4-7, hence the permutation.
    static void store_words(void* p, Word a, void* q, Word b) {
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
        _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
        _mm_storeu_si128(static_cast<__m128i*>(q), _mm256_extracti128_si256(packed, 1));
    }
    static Float load_bf16(const uint16_t* p) { return _mm256_castsi256_ps(high_word(p)); }
    static Float load_halves(const uint16_t* high, const int16_t* low) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
        return _mm256_castsi256_ps(_mm256_add_epi32(high_word(high), _mm256_cvtepi16_epi32(words)));
    }
    static void store_halves(uint16_t* high, int16_t* low, Float x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
        store_words(high, rounded, low, low_half(bits));
    }

   private:
    static __m256i high_word(const uint16_t* p) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
    }
};

}  // namespace

void step_avx2(const Run& run, int64_t begin, int64_t end) { step_lanes<Avx2Lanes>(run, begin, end); }

}  // namespace megatrain

#endif
