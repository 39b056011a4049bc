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

// N elements as one access. Loops over them are unrolled, so that they live in registers.
template <int N>
struct alignas(2 * N) Words {
    u16 of[N];
};
template <int N>
struct alignas(4 * N) Floats {
    float of[N];
};

template <class Elements>
__device__ inline Elements load(const void* stream, i64 i) {
    return *reinterpret_cast<const Elements*>(reinterpret_cast<const char*>(stream) + i * sizeof(Elements::of[0]));
}

template <class Elements>
__device__ inline void store(void* stream, i64 i, const Elements& elements) {
    *reinterpret_cast<Elements*>(reinterpret_cast<char*>(stream) + i * sizeof(Elements::of[0])) = elements;
}

template <int N>
__device__ inline Floats<N> load_narrow(const void* stream, i64 i) {
    const Words<N> words = load<Words<N>>(stream, i);
    Floats<N> floats;
#pragma unroll
    for (int k = 0; k < N; ++k) floats.of[k] = __uint_as_float(static_cast<u32>(words.of[k]) << 16);
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

template <int N>
__device__ inline Floats<N> load_masters(const Run& r, i64 i) {
    const Words<N> high = load<Words<N>>(r.weights, i), low = load<Words<N>>(r.low, i);
    Floats<N> masters;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const u32 signed_low = static_cast<u32>(static_cast<int>(static_cast<short>(low.of[k])));
        masters.of[k] = __uint_as_float((static_cast<u32>(high.of[k]) << 16) + signed_low);
    }
    return masters;
}

template <int N>
__device__ inline void store_masters(const Run& r, i64 i, const Floats<N>& masters) {
    Words<N> high, low;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const u32 bits = __float_as_uint(masters.of[k]);
        high.of[k] = static_cast<u16>((bits + 0x8000u) >> 16);
        low.of[k] = static_cast<u16>(bits);
    }
    store(r.weights, i, high);
    store(r.low, i, low);
}

template <int N>
__device__ inline void store_rounded(const Run& r, i64 i, const Floats<N>& m, const Floats<N>& v) {
    Words<N> narrow_m, narrow_v;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const u32 random = random_word(r, i + k);
        narrow_m.of[k] = rounded(m.of[k], random & 0xffffu);
        narrow_v.of[k] = rounded(v.of[k], random >> 16);
    }
    store(r.exp_avg, i, narrow_m);
    store(r.exp_avg_sq, i, narrow_v);
}

// Elements i ... i + N - 1.
template <int N>
__device__ inline void update_at(const Run& r, i64 i) {
    const bool halves = r.low != nullptr;
    const Floats<N> grad = halves ? load_narrow<N>(r.grad, i) : load<Floats<N>>(r.grad, i);
    Floats<N> weight = halves ? load_masters<N>(r, i) : load<Floats<N>>(r.weights, i);
    Floats<N> m = r.bf16_moments ? load_narrow<N>(r.exp_avg, i) : load<Floats<N>>(r.exp_avg, i);
    Floats<N> v = r.bf16_moments ? load_narrow<N>(r.exp_avg_sq, i) : load<Floats<N>>(r.exp_avg_sq, i);
#pragma unroll
    for (int k = 0; k < N; ++k) update(r, grad.of[k], weight.of[k], m.of[k], v.of[k], i + k >= r.n - r.n % 8);
    if (halves) {
        store_masters<N>(r, i, weight);
    } else {
        store(r.weights, i, weight);
    }
    if (r.bf16_moments) {
        store_rounded<N>(r, i, m, v);
    } else {
        store(r.exp_avg, i, m);
        store(r.exp_avg_sq, i, v);
    }
}

// Four elements a thread, one by one where the run ends. Every stream starts at a multiple of 16 bytes (layout.py).
extern "C" __global__ void megatrain_adamw(const Run r) {
    i64 i = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= r.n) {
        update_at<4>(r, i);
        return;
    }
    for (; i < r.n; ++i) update_at<1>(r, i);
}
