// Sixteen elements at a time. Compiled with -mavx512f -mfma, called only where CPU and kernel have AVX-512.
#if defined(__x86_64__)

#include <immintrin.h>

#include "step.h"

namespace megatrain {
namespace {

struct Avx512Lanes {
    using Float = __m512;
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
    static Float load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(high_word(p)); }
    static Float load_halves(const uint16_t* high, const int16_t* low) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
        return _mm512_castsi512_ps(_mm512_add_epi32(high_word(high), _mm512_cvtepi16_epi32(words)));
    }
    static void store_halves(uint16_t* high, int16_t* low, Float x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi32_epi16(rounded));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi32_epi16(bits));
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
