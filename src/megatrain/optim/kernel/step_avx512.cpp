// Sixteen elements at a time. Compiled with -mavx512f -mfma, called only where CPU and kernel have AVX-512.
#if defined(__x86_64__)

#include <immintrin.h>

#include "step.h"

namespace megatrain {
namespace {

struct Avx512Lanes {
    using Float = __m512;
    using Word = __m512i;
    static constexpr int64_t width = 16;
    static Float fill(float x) { return _mm512_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float negative(Float a) { return _mm512_mul_ps(a, _mm512_set1_ps(-1.0f)); }
    static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
    static Word fill_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static Word count_from(uint32_t x) {
        return _mm512_add_epi32(fill_word(x), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    static Word plus(Word a, Word b) { return _mm512_add_epi32(a, b); }
    static Word times(Word a, Word b) { return _mm512_mullo_epi32(a, b); }
    static Word exclusive_or(Word a, Word b) { return _mm512_xor_si512(a, b); }
    static Word low_half(Word a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
    template <int places>
    static Word shift(Word a) {
        return _mm512_srli_epi32(a, places);
    }
    static Word rounded(Float x, Word random) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i magnitude = _mm512_and_si512(bits, fill_word(kMagnitude));
        const __mmask16 rounds = _mm512_cmplt_epu32_mask(magnitude, fill_word(kLargestBf16));
        return _mm512_srli_epi32(_mm512_mask_add_epi32(bits, rounds, bits, random), 16);  // bits where it does not round
    }
    // The low halves of the lanes.
    static void store_words(void* p, Word a, void* q, Word b) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
        _mm256_storeu_si256(static_cast<__m256i*>(q), _mm512_cvtepi32_epi16(b));
    }
    static Float load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(high_word(p)); }
    static Float load_halves(const uint16_t* high, const int16_t* low) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
        return _mm512_castsi512_ps(_mm512_add_epi32(high_word(high), _mm512_cvtepi16_epi32(words)));
    }
    static void store_halves(uint16_t* high, int16_t* low, Float x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
        store_words(high, rounded, low, bits);
    }

   private:
    static __m512i high_word(const uint16_t* p) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
    }
};

}  // namespace

void step_avx512(const Run& run, int64_t begin, int64_t end) { step_lanes<Avx512Lanes>(run, begin, end); }

}  // namespace megatrain

#endif
