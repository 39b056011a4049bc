// The update of step.h for an element that lives on a CUDA device: the same operations in the same order, so the same
// bits. Compiled when it is first needed (NVRTC), hence no headers; on_device.py launches it.
//
// The __f*_rn intrinsics are IEEE operations that the compiler neither contracts nor approximates.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Run {  // adamw.h
    void* weights;
    short* low;
    void* exp_avg;
    void* exp_avg_sq;
    const void* grad;
    i64 n;
    u32 bf16_moments;
    u32 first, key0, key1;
    float clip, keep, lerp, beta2, square, bias2_sqrt, eps, neg_step;
};

// Four elements as one access.
struct alignas(8) Words {
    u16 of[4];
};
struct alignas(16) Floats {
    float of[4];
};

__device__ inline float wide(u16 high) { return __uint_as_float(static_cast<u32>(high) << 16); }

// Words a thread reads or writes at once. `some` of them where the run ends.
__device__ inline Words load_words(const void* stream, i64 i, int some) {
    const u16* at = static_cast<const u16*>(stream) + i;
    if (some == 4) return *reinterpret_cast<const Words*>(at);
    Words words = {};
    for (int k = 0; k < some; ++k) words.of[k] = at[k];
    return words;
}

__device__ inline void store_words(void* stream, i64 i, int some, const Words& words) {
    u16* at = static_cast<u16*>(stream) + i;
    if (some == 4) *reinterpret_cast<Words*>(at) = words;
    else for (int k = 0; k < some; ++k) at[k] = words.of[k];
}

__device__ inline Floats load_floats(const void* stream, i64 i, int some) {
    const float* at = static_cast<const float*>(stream) + i;
    if (some == 4) return *reinterpret_cast<const Floats*>(at);
    Floats floats = {};
    for (int k = 0; k < some; ++k) floats.of[k] = at[k];
    return floats;
}

__device__ inline void store_floats(void* stream, i64 i, int some, const Floats& floats) {
    float* at = static_cast<float*>(stream) + i;
    if (some == 4) *reinterpret_cast<Floats*>(at) = floats;
    else for (int k = 0; k < some; ++k) at[k] = floats.of[k];
}

__device__ inline Floats load_narrow(const void* stream, i64 i, int some) {
    const Words words = load_words(stream, i, some);
    Floats floats;
    for (int k = 0; k < 4; ++k) floats.of[k] = wide(words.of[k]);
    return floats;
}

// rounding.py: 16 random bits are added to the bits of x and the low half is cut off, but for the largest and NaN.
__device__ inline u16 rounded(float x, u32 random) {
    const u32 bits = __float_as_uint(x);
    return static_cast<u16>(((bits & 0x7fffffffu) < 0x7f7f0000u ? bits + random : bits) >> 16);
}

__device__ inline u32 random_word(const Run& r, i64 i) {
    u32 h = (r.first + static_cast<u32>(i)) ^ r.key0;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) + r.key1;
    h *= 0x846ca68bu;
    return h ^ (h >> 16);
}

// One element: `weight`, `m` and `v` are updated. `torch_tail`: among the last n % 8, see definition.py.
__device__ inline void update(const Run& r, float grad, float& weight, float& m, float& v, bool torch_tail) {
    grad = __fmul_rn(grad, r.clip);
    weight = __fmul_rn(weight, r.keep);
    const float away = __fsub_rn(grad, m);
    if (fabsf(r.lerp) < 0.5f) m = __fmaf_rn(r.lerp, away, m);
    else if (!torch_tail) m = __fmaf_rn(__fsub_rn(r.lerp, 1.0f), away, grad);
    else m = __fmaf_rn(__fsub_rn(1.0f, r.lerp), -away, grad);
    const float part = __fmul_rn(r.square, grad);
    v = torch_tail ? __fmaf_rn(v, r.beta2, __fmul_rn(part, grad)) : __fmaf_rn(part, grad, __fmul_rn(v, r.beta2));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), r.bias2_sqrt), r.eps);
    weight = __fadd_rn(weight, __fdiv_rn(__fmul_rn(r.neg_step, m), denominator));
}

// Four elements a thread. Every stream of a run starts at a multiple of 16 bytes (layout.py).
extern "C" __global__ void megatrain_adamw(const Run r) {
    const i64 i = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= r.n) return;
    const int some = r.n - i < 4 ? static_cast<int>(r.n - i) : 4;
    const bool halves = r.low != nullptr;
    Floats weight, grad;
    if (halves) {
        const Words high = load_words(r.weights, i, some), low = load_words(r.low, i, some);
        for (int k = 0; k < 4; ++k) {
            const u32 signed_low = static_cast<u32>(static_cast<int>(static_cast<short>(low.of[k])));
            weight.of[k] = __uint_as_float((static_cast<u32>(high.of[k]) << 16) + signed_low);
        }
        grad = load_narrow(r.grad, i, some);
    } else {
        weight = load_floats(r.weights, i, some);
        grad = load_floats(r.grad, i, some);
    }
    Floats m = r.bf16_moments ? load_narrow(r.exp_avg, i, some) : load_floats(r.exp_avg, i, some);
    Floats v = r.bf16_moments ? load_narrow(r.exp_avg_sq, i, some) : load_floats(r.exp_avg_sq, i, some);
    for (int k = 0; k < some; ++k) {
        update(r, grad.of[k], weight.of[k], m.of[k], v.of[k], i + k >= r.n - r.n % 8);
    }
    if (halves) {
        Words high, low;
        for (int k = 0; k < 4; ++k) {
            const u32 bits = __float_as_uint(weight.of[k]);
            high.of[k] = static_cast<u16>((bits + 0x8000u) >> 16);
            low.of[k] = static_cast<u16>(bits);
        }
        store_words(r.weights, i, some, high);
        store_words(r.low, i, some, low);
    } else {
        store_floats(r.weights, i, some, weight);
    }
    if (r.bf16_moments) {
        Words narrow_m, narrow_v;
        for (int k = 0; k < 4; ++k) {
            const u32 random = random_word(r, i + k);
            narrow_m.of[k] = rounded(m.of[k], random & 0xffffu);
            narrow_v.of[k] = rounded(v.of[k], random >> 16);
        }
        store_words(r.exp_avg, i, some, narrow_m);
        store_words(r.exp_avg_sq, i, some, narrow_v);
    } else {
        store_floats(r.exp_avg, i, some, m);
        store_floats(r.exp_avg_sq, i, some, v);
    }
}
