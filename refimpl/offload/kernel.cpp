// One step of AdamW on n elements, in one pass over memory: with 16-bit gradients and weights it takes 28 bytes an
// element. (torch's kernels cast in passes of their own.)
//
//   m <- m + (1 - beta1)(g - m)                     v <- beta2 v + (1 - beta2) g^2
//   p <- (1 - lr w) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Products are rounded, and fused with a sum, where torch's fused kernel does so: the numbers are the same to the bit.
// Compiled without contraction, so that the compiler fuses no others.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t GROUP = 64;  // elements: their weights fill whole cache lines
constexpr int64_t AHEAD = 128;  // elements from the group being updated to the one being fetched

struct Step { float decay, one_minus_beta1, beta2, one_minus_beta2, correction, eps, minus_step_size; };

struct bf16 { uint16_t bits; };
#if defined(__FLT16_MANT_DIG__)
using fp16 = _Float16;
constexpr bool HAS_FP16 = true;
#else
struct fp16 { uint16_t bits; operator float() const { return 0; } explicit fp16(float = 0) : bits(0) {} };
constexpr bool HAS_FP16 = false;
#endif
struct none {};

inline float wide(float x) { return x; }
inline float wide(fp16 x) { return float(x); }
inline float wide(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void narrow(float x, none&) {}
inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, fp16& y) { y = fp16(x); }
inline void narrow(float x, bf16& y) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

// The mean is reached from m, or from g if that is nearer, as in torch's lerp.
template <bool FROM_GRADIENT, class G, class L>
inline void adamw(float* __restrict p, float* __restrict m, float* __restrict v, const G* __restrict gradients,
                  L* __restrict low, int64_t n, Step s) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = wide(gradients[i]);
        const float mean = FROM_GRADIENT ? std::fma(s.one_minus_beta1 - 1.0f, g - m[i], g)
                                         : std::fma(s.one_minus_beta1, g - m[i], m[i]);
        const float square = std::fma(s.one_minus_beta2 * g, g, v[i] * s.beta2);
        m[i] = mean;
        v[i] = square;
        p[i] = p[i] * s.decay + s.minus_step_size * mean / (std::sqrt(square) / s.correction + s.eps);
        narrow(p[i], low[i]);
    }
}

// Writes past the caches: nobody reads the weights here, and a line that is written whole need not be read first.
template <class L>
inline void stream(L* to, const L* from) {
#if defined(__SSE2__)
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    for (size_t i = 0; i < GROUP * sizeof(L) / 16; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
#else
    std::memcpy(to, from, GROUP * sizeof(L));
#endif
}

// Asks for lines that come next: four streams with writes between them are more than some processors foresee.
template <class T>
inline void fetch(const T* group) {
#if defined(__GNUC__)
    for (size_t byte = 0; byte < GROUP * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(group) + byte);
#endif
}

template <bool FROM_GRADIENT, class G, class L>
inline void group_of(float* p, float* m, float* v, const G* g, L* low, int64_t n, Step s) {
    fetch(p + AHEAD);
    fetch(m + AHEAD);
    fetch(v + AHEAD);
    fetch(g + AHEAD);
    adamw<FROM_GRADIENT>(p, m, v, g, low, n, s);
}

template <bool FROM_GRADIENT, class G, class L>
void all(float* p, float* m, float* v, const G* g, L* low, int64_t n, Step s) {
    int64_t i = 0;
    if (reinterpret_cast<uintptr_t>(low) % 16 == 0) {
        alignas(64) L group[GROUP];
        for (; i + GROUP <= n; i += GROUP) {
            group_of<FROM_GRADIENT>(p + i, m + i, v + i, g + i, group, GROUP, s);
            stream(low + i, group);
        }
#if defined(__SSE2__)
        _mm_sfence();  // before another thread copies the weights
#endif
    }
    adamw<FROM_GRADIENT>(p + i, m + i, v + i, g + i, low + i, n - i, s);
}

template <bool FROM_GRADIENT, class G>
void without_weights(float* p, float* m, float* v, const G* g, int64_t n, Step s) {
    none nothing[GROUP];
    for (int64_t i = 0; i < n; i += GROUP)
        group_of<FROM_GRADIENT>(p + i, m + i, v + i, g + i, nothing, std::min(GROUP, n - i), s);
}

template <bool FROM_GRADIENT, class G>
void by_weights(float* p, float* m, float* v, const G* g, void* low, int32_t dtype, int64_t n, Step s) {
    if (low == nullptr) without_weights<FROM_GRADIENT>(p, m, v, g, n, s);
    else if (dtype == 0) all<FROM_GRADIENT>(p, m, v, g, static_cast<float*>(low), n, s);
    else if (dtype == 1) all<FROM_GRADIENT>(p, m, v, g, static_cast<bf16*>(low), n, s);
    else all<FROM_GRADIENT>(p, m, v, g, static_cast<fp16*>(low), n, s);
}

template <bool FROM_GRADIENT>
void by_gradients(float* p, float* m, float* v, const void* g, int32_t dtype, void* low, int32_t low_dtype, int64_t n,
                  Step s) {
    if (dtype == 0) by_weights<FROM_GRADIENT>(p, m, v, static_cast<const float*>(g), low, low_dtype, n, s);
    else if (dtype == 1) by_weights<FROM_GRADIENT>(p, m, v, static_cast<const bf16*>(g), low, low_dtype, n, s);
    else by_weights<FROM_GRADIENT>(p, m, v, static_cast<const fp16*>(g), low, low_dtype, n, s);
}

}  // namespace

extern "C" int has_half() { return HAS_FP16; }

// p, m, v: fp32. g: the gradient. low: null, or where the new weights are written. Dtypes: 0 fp32, 1 bf16, 2 fp16.
// Threads that are given the same `next`, 0 at first, share the n elements: each takes PIECE after PIECE until none is
// left, so one that wakes late leaves more to the others, and nobody waits for it long.
extern "C" void step(float* p, float* m, float* v, const void* g, int32_t g_dtype, void* low, int32_t low_dtype,
                     int64_t n, Step s, int64_t* next) {
    constexpr int64_t PIECE = 1 << 18, WIDTHS[] = {4, 2, 2};
    for (int64_t i; (i = __atomic_fetch_add(next, PIECE, __ATOMIC_RELAXED)) < n;) {
        const auto* gradient = static_cast<const char*>(g) + i * WIDTHS[g_dtype];
        void* weights = low == nullptr ? nullptr : static_cast<char*>(low) + i * WIDTHS[low_dtype];
        (s.one_minus_beta1 < 0.5f ? by_gradients<false> : by_gradients<true>)(
            p + i, m + i, v + i, gradient, g_dtype, weights, low_dtype, n - i < PIECE ? n - i : PIECE, s);
    }
}
