// Fused CPU kernels behind a plain C ABI; `plain.py` defines what each computes, `cpu.py` packs the arguments.
//
// Every operator is `void dsv4_<op>(const Call*)`, so a captured step is an array of Calls that `dsv4_run` executes.
//
// Row independence is the contract: the bits of a row do not depend on how many rows there are, on its neighbours, on the
// number of threads or on the vector width of the machine. So every float reduction runs over 16 fixed lanes (element i
// belongs to lane i % 16) which are folded 8, 4, 2, 1, but for products of bf16, which have the order of the matrix unit
// (`panel_tile`); nothing is split over the reduced axis, contraction is off, and fused multiply-adds are written out.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

struct Call {
    void (*fn)(const Call*);
    void* ptr[20];
    int64_t i[24];
    double f[8];
};

namespace {

using i64 = int64_t;
using i32 = int32_t;

// ---- vectors ----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;  // machine vectors in the 16 lanes of a reduction

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int16_t svec __attribute__((vector_size(2 * LANES)));
typedef int8_t qvec __attribute__((vector_size(LANES)));
using Lanes = std::make_integer_sequence<int, LANES>;

struct bf16 {
    uint16_t bits;
};

#define FLAT __attribute__((always_inline))
#define INLINE inline FLAT

INLINE vec splat(float x) { return x - vec{}; }  // x + 0 would be an addition: it turns -0 into 0

INLINE vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    for (int j = 0; j < LANES; ++j) c[j] = __builtin_fmaf(a[j], b[j], c[j]);
    return c;
#endif
}

INLINE vec max(vec a, vec b) { return a > b ? a : b; }
INLINE vec min(vec a, vec b) { return a < b ? a : b; }
INLINE vec abs(vec a) { return (vec)((ivec)a & 0x7fffffff); }

INLINE vec sqrt(vec a) {
    for (int j = 0; j < LANES; ++j) a[j] = __builtin_sqrtf(a[j]);
    return a;
}

INLINE vec round_bf16(vec a) {
    uvec u = (uvec)a;
    return (vec)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}

INLINE vec load(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vec load(const bf16* p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

INLINE vec load(const int8_t* p) {
    qvec q;
    memcpy(&q, p, sizeof q);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(q, svec), ivec), vec);  // GCC widens by 2
}

INLINE void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

INLINE void store(bf16* p, vec v) {
    hvec h = __builtin_convertvector((uvec)round_bf16(v) >> 16, hvec);
    memcpy(p, &h, sizeof h);
}

// The first `n` lanes; the others read as 0 and are not touched in memory.
template <class T> INLINE vec load(const T* p, i64 n) {
    if (n >= LANES) return load(p);
    T buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T> INLINE void store(T* p, vec v, i64 n) {
    if (n >= LANES) return store(p, v);
    T buffer[LANES];
    store(buffer, v);
    memcpy(p, buffer, n * sizeof(T));
}

// What a value becomes when it meets a weight or cache of type T.
template <class T> INLINE vec rounded(vec v) { return v; }
template <> INLINE vec rounded<bf16>(vec v) { return round_bf16(v); }

INLINE float get(const float* p) { return *p; }
INLINE float get(const bf16* p) {
    uint32_t u = uint32_t(p->bits) << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// Calls f(i, n) for each machine vector of `count` elements: n of them from i on.
template <class F> INLINE void each(i64 count, const F& f) {
    for (i64 i = 0; i < count; i += LANES) f(i, std::min<i64>(LANES, count - i));
}

template <class To, class From> INLINE void copy_row(To* to, const From* from, i64 k) {
    if constexpr (std::is_same_v<To, From>)
        memcpy(to, from, k * sizeof(To));
    else
        each(k, [&](i64 i, i64 m) { store(to + i, load(from + i, m), m); });
}

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif

// `combine` over all lanes: j with j + LANES / 2, then those H apart for smaller H.
template <int H, class V, int... J> INLINE V swap_lanes(V v, std::integer_sequence<int, J...>) {
    return SHUFFLE(v, v, (J ^ H)...);
}

template <int H = LANES / 2, class V, class F> INLINE V over_lanes(V v, const F& combine) {
    v = combine(v, swap_lanes<H>(v, Lanes{}));
    if constexpr (H > 1)
        return over_lanes<H / 2>(v, combine);
    else
        return v;
}

INLINE float fold(vec v) {
    return over_lanes(v, [](vec a, vec b) FLAT { return a + b; })[0];
}

INLINE float greatest(vec v) {
    return over_lanes(v, [](vec a, vec b) FLAT { return max(a, b); })[0];
}

// Sum of term(i, n) over 16 lanes; term must return 0 in the lanes past n.
template <class F> INLINE float sum(i64 count, const F& term) {
    vec lanes[PARTS] = {};
    for (i64 i = 0; i < count; i += 16)
        for (int p = 0; p < PARTS; ++p)
            if (i64 at = i + p * LANES; at < count) lanes[p] = term(at, std::min<i64>(LANES, count - at), lanes[p]);
    for (int half = PARTS / 2; half; half /= 2)
        for (int p = 0; p < half; ++p) lanes[p] += lanes[p + half];
    return fold(lanes[0]);
}

template <class T> INLINE float sum_squares(const T* x, i64 n) {
    return sum(n, [&](i64 i, i64 m, vec acc) {
        vec v = load(x + i, m);
        return fma(v, v, acc);
    });
}

// e^x to 1 ulp for -87.3 <= x <= 88; 0 below, e^88 above: nothing here needs more range.
INLINE vec exp(vec x) {
    vec y = max(min(x, splat(88.0f)), splat(-87.3f));
    vec n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vec r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return x < splat(-87.3f) ? vec{} : p * power;
}

INLINE float exp(float x) { return exp(splat(x))[0]; }
INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + x) for 0 <= x <= 1.
INLINE vec log1p(vec x) {
    vec u = 1.0f + x, lost = x - (u - 1.0f);
    ivec upper = u > splat(1.41421356f);
    vec e = upper ? splat(1.0f) : vec{}, m = (upper ? u * 0.5f : u) - 1.0f, z = m * m;
    vec p = splat(7.0376836292e-2f);
    p = fma(p, m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    vec y = fma(e, splat(-2.12194440e-4f), p * m * z);
    y = fma(z, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), m + y) + lost / u;
}

// ---- threads and scratch ------------------------------------------------------------------------------------------------

constexpr double FORK_COST = 1500, WAKE_COST = 20000;  // vector operations that pay for one more thread, awake or asleep

INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Helpers that take pieces of a job while its caller does the same. The caller never waits for a helper that has not begun, so
// a busy machine does not hold it up (OpenMP's join does: it waits a time slice for a thread that has nothing to do).
class Pool {
  public:
    using Body = void (*)(const void* context, i64 begin, i64 end);

    void run(int threads, i64 n, i64 step, Body body, const void* context) {
        if (busy_.test_and_set(std::memory_order_acquire))
            return body(context, 0, n);  // another Python thread is using the helpers
        for (; helpers_ < threads - 1; ++helpers_) std::thread(&Pool::help, this, helpers_).detach();
        step = std::max(step, (n + INDEX - 1) / INDEX);
        const i64 pieces = (n + step - 1) / step;
        job_.body.store(body, std::memory_order_relaxed);
        job_.context.store(context, std::memory_order_relaxed);
        job_.n.store(n, std::memory_order_relaxed);
        job_.step.store(step, std::memory_order_relaxed);
        job_.helpers.store(threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        uint64_t claim = ((job_.claim.load(std::memory_order_relaxed) >> 32) + 1) << 32 | uint64_t(pieces) << 16;
        job_.claim.store(claim | 1);  // the first piece is the caller's
        if (sleepers_.load()) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        i64 own = 1;
        body(context, 0, std::min(step, n));
        for (claim = job_.claim.load(); available(claim);)
            if (job_.claim.compare_exchange_weak(claim, claim + 1)) {
                i64 at = i64(claim & INDEX) * step;
                body(context, at, std::min(at + step, n));
                ++own;
                claim = job_.claim.load();
            }
        for (int spins = 0; done_.load(std::memory_order_acquire) != pieces - own; ++spins)
            spins < 4000 ? relax() : std::this_thread::yield();
        busy_.clear(std::memory_order_release);
    }

    bool sleeping() const { return sleepers_.load(std::memory_order_relaxed) > 0; }

  private:
    static constexpr i64 INDEX = 0xffff;
    // About a millisecond, longer than from one decode step to the next: to wake a sleeper takes its waker 40 us where a halted
    // core is left to a hypervisor.
    static constexpr int SPINS = 500, YIELDS = 2500;

    // claim: number of the job << 32 | its pieces << 16 | the next one. The rest is read before a piece is claimed, and belongs
    // to the piece if the claim succeeds: it changes only when none is left.
    struct alignas(64) Job {
        std::atomic<uint64_t> claim{0};
        std::atomic<Body> body{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<i64> n{0}, step{1};
        std::atomic<int> helpers{0};
    };

    static bool available(uint64_t claim) { return (claim & INDEX) < (claim >> 16 & INDEX); }

    // Does one piece if there is one for helper `me`.
    bool take(int me) {
        uint64_t claim = job_.claim.load(std::memory_order_acquire);
        if (!available(claim) || me >= job_.helpers.load(std::memory_order_relaxed)) return false;
        Body body = job_.body.load(std::memory_order_relaxed);
        const void* context = job_.context.load(std::memory_order_relaxed);
        i64 n = job_.n.load(std::memory_order_relaxed), step = job_.step.load(std::memory_order_relaxed);
        i64 at = i64(claim & INDEX) * step;
        if (!job_.claim.compare_exchange_strong(claim, claim + 1)) return true;
        body(context, at, std::min(at + step, n));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help(int me) {
#if defined(__linux__)
        sched_param param{};  // a thread that gives way to computing ones may have started this one
        pthread_setschedparam(pthread_self(), SCHED_OTHER, &param);
#endif
        for (int idle = 0;;) {
            if (take(me)) {
                idle = 0;
            } else if (++idle < SPINS) {
                relax();
            } else if (idle < SPINS + YIELDS) {
                std::this_thread::yield();  // Python threads may be waiting for this core
            } else {
                std::unique_lock<std::mutex> lock(sleep_);
                ++sleepers_;  // before looking once more: who publishes a job afterwards sees a sleeper
                while (!available(job_.claim.load()) || me >= job_.helpers.load()) wake_.wait(lock);
                --sleepers_;
                idle = 0;
            }
        }
    }

    Job job_;
    alignas(64) std::atomic<uint64_t> done_{0};
    alignas(64) std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
    int helpers_ = 0;
};

Pool* pool = [] {  // never destroyed: helpers may outlive everything else
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });  // a forked process has none of its parent's helpers
    return new Pool;
}();
thread_local int thread_limit = 1;

// body(begin, end) over 0..n in pieces; `cost` is that of one item, in vector operations.
template <class F> void parallel(i64 n, double cost, const F& body) {
    double worth = n * cost / (pool->sleeping() ? WAKE_COST : FORK_COST);
    int threads = int(std::min<double>(std::min<i64>(thread_limit, n), worth));
    // Small pieces even out a helper that comes late, but each is claimed by a write to a line that all of them want.
    i64 pieces = threads * i64(std::max(2.0, std::min(8.0, worth / (threads * 32))));
    if (threads > 1)
        pool->run(threads, n, std::max<i64>(1, n / pieces),
                 [](const void* f, i64 begin, i64 end) { (*static_cast<const F*>(f))(begin, end); }, &body);
    else if (n > 0)
        body(i64(0), n);
}

// A grow-only buffer; each place that needs one owns it, each thread has its own.
class Buffer {
  public:
    ~Buffer() { free(data_); }
    void* get(size_t bytes) {
        if (bytes > size_) {
            free(data_);
            size_ = (bytes + bytes / 4 + 63) / 64 * 64;
            data_ = aligned_alloc(64, size_);
            if (!data_) abort();
        }
        return data_;
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

#define SCRATCH(type, name, count)           \
    static thread_local Buffer name##_buffer; \
    type* name = static_cast<type*>(name##_buffer.get(sizeof(type) * size_t(count)))

// ---- arguments ------------------------------------------------------------------------------------------------------------

enum DType { F32, BF16, I8 };

// Reads a call's pointers, integers and floats in the order in which `cpu.py` packs them.
class Args {
  public:
    explicit Args(const Call* c) : c_(c) {}
    template <class T> T* tensor() { return static_cast<T*>(c_->ptr[p_++]); }
    i64 size() { return c_->i[i_++]; }
    float real() { return float(c_->f[f_++]); }

  private:
    const Call* c_;
    int p_ = 0, i_ = 0, f_ = 0;
};

// Calls f with a null pointer of the element type.
template <class F> INLINE void with_float(i64 dtype, const F& f) {
    if (dtype == BF16)
        f(static_cast<const bf16*>(nullptr));
    else
        f(static_cast<const float*>(nullptr));
}
template <class T> using Elem = std::remove_const_t<std::remove_pointer_t<T>>;

INLINE i64 floor_div(i64 a, i64 b) { return a / b - (a % b < 0); }
INLINE i64 clamp(i64 x, i64 low, i64 high) { return std::max(low, std::min(x, high)); }
INLINE bool inside(i64 row, i64 rows) { return uint64_t(row) < uint64_t(rows); }

// n rows of k values at stride ld as W: `x` itself where nothing has to change, else a copy in `scratch`.
template <class W> struct Strided {
    const W* data;
    i64 stride;
    const W* operator[](i64 r) const { return data + r * stride; }
};
using FloatRows = Strided<float>;

template <class W, int SLOT = 0> Strided<W> float_rows(const void* x, i64 dtype, i64 n, i64 k, i64 ld) {
    if ((dtype == F32) == std::is_same_v<W, float>) return {static_cast<const W*>(x), ld};
    SCRATCH(W, copy, n * k);
    with_float(dtype, [&](auto* tag) {
        using X = Elem<decltype(tag)>;
        parallel(n, k / LANES, [&](i64 begin, i64 end) {
            for (i64 r = begin; r < end; ++r) {
                const X* from = static_cast<const X*>(x) + r * ld;
                copy_row(copy + r * k, from, k);
            }
        });
    });
    return {copy, k};
}

// ---- products -------------------------------------------------------------------------------------------------------------

// Lane of (a, b) that the fold by H takes into lane j: groups of 2H lanes hold H lanes of a, then H lanes of b.
template <int H> constexpr int folded(int j, int shift) {
    int within = j % (2 * H);
    return j / (2 * H) * 2 * H + within % H + shift + (within < H ? 0 : LANES);
}

template <int H, class V, int... J> INLINE V fold_pair(V a, V b, std::integer_sequence<int, J...>) {
    return SHUFFLE(a, b, folded<H>(J, 0)...) + SHUFFLE(a, b, folded<H>(J, H)...);
}

template <int H, int... J> INLINE void cross(vec& a, vec& b, std::integer_sequence<int, J...>) {
    vec low = SHUFFLE(a, b, folded<H>(J, 0)...);
    b = SHUFFLE(a, b, folded<H>(J, H)...);
    a = low;
}

// Turns LANES rows into LANES columns.
template <int H = LANES / 2> INLINE void transpose(vec* v) {
    for (int j = 0; j < LANES; ++j)
        if (!(j & H)) cross<H>(v[j], v[j + H], Lanes{});
    if constexpr (H > 1) transpose<H / 2>(v);
}

// Lane j of the result is the sum of the lanes of v[j], in the order of `fold`.
template <int H = LANES / 2, class V> INLINE V fold_all(V* v) {
    for (int j = 0; j < H; ++j) v[j] = fold_pair<H>(v[j], v[j + H], Lanes{});
    if constexpr (H > 1)
        return fold_all<H / 2>(v);
    else
        return v[0];
}

// The left operand: rows of the weights' type; int8 with the factor of each row and its sum.
template <class W> struct Rows {
    const W* const* at;
    Rows from(i64 r) const { return {at + r}; }
};
template <> struct Rows<int8_t> {
    const int8_t* const* at;
    const float* scale;
    const i32* sum;
    Rows from(i64 r) const { return {at + r, scale + r, sum + r}; }
};

// Lane r * C + c: x[r] . w[c]. R rows, C = LANES / R weights; `rows` and `cols` of them exist, the others repeat the last.
template <int R, class W> INLINE vec tile(Rows<W> x, i64 rows, const W* const* w, i64 cols, i64 k) {
    constexpr int C = LANES / R;
    const float* xs[R];
    const W* ws[C];
    for (int r = 0; r < R; ++r) xs[r] = x.at[std::min<i64>(r, rows - 1)];
    for (int c = 0; c < C; ++c) ws[c] = w[std::min<i64>(c, cols - 1)];
    vec total[PARTS][LANES];
    for (int p = 0; p < PARTS; ++p) {
        vec acc[LANES] = {};
        i64 i = p * LANES;
        for (; i + LANES <= k; i += 16) {
            vec xv[R];
            for (int r = 0; r < R; ++r) xv[r] = load(xs[r] + i);
            for (int c = 0; c < C; ++c) {
                vec wv = load(ws[c] + i);
                for (int r = 0; r < R; ++r) acc[r * C + c] = fma(xv[r], wv, acc[r * C + c]);
            }
        }
        if (i < k)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    acc[r * C + c] = fma(load(xs[r] + i, k - i), load(ws[c] + i, k - i), acc[r * C + c]);
        for (int j = 0; j < LANES; ++j) total[p][j] = acc[j];
    }
    for (int step = PARTS / 2; step; step /= 2)
        for (int p = 0; p < step; ++p)
            for (int j = 0; j < LANES; ++j) total[p][j] += total[p + step][j];
    return fold_all(total[0]);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
// u8 x s8: the weight is moved to 0..255 by flipping its sign bit, and 128 * sum(x) is taken off the result.
constexpr int STEP = 64, OFFSET = 128;
typedef __m512i bytes;
INLINE bytes load_bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
INLINE bytes load_bytes(const int8_t* p, i64 n) { return _mm512_maskz_loadu_epi8((uint64_t(1) << n) - 1, p); }
INLINE bytes as_weight(bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INLINE ivec dot(ivec acc, bytes x, bytes w) { return (ivec)_mm512_dpbusd_epi32((__m512i)acc, w, x); }
#elif defined(__AVX2__)
// Widened to int16, so that pair sums are exact for every int8 value.
constexpr int STEP = 2 * LANES, OFFSET = 0;
#if defined(__AVX512BW__)
typedef __m512i bytes;
INLINE bytes load_bytes(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
INLINE ivec dot(ivec acc, bytes x, bytes w) { return acc + (ivec)_mm512_madd_epi16(x, w); }
#elif !defined(__AVX512F__)
typedef __m256i bytes;
INLINE bytes load_bytes(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
INLINE ivec dot(ivec acc, bytes x, bytes w) { return acc + (ivec)_mm256_madd_epi16(x, w); }
#else
#error "AVX-512F without AVX-512BW: build with -mno-avx512f"
#endif
#define TAIL_BY_COPY
#else
constexpr int STEP = LANES, OFFSET = 0;
typedef ivec bytes;
INLINE bytes load_bytes(const int8_t* p) {
    qvec q;
    memcpy(&q, p, sizeof q);
    return __builtin_convertvector(q, ivec);
}
INLINE ivec dot(ivec acc, bytes x, bytes w) { return acc + x * w; }
#define TAIL_BY_COPY
#endif
#if defined(TAIL_BY_COPY)
INLINE bytes load_bytes(const int8_t* p, i64 n) {
    int8_t buffer[STEP] = {};
    memcpy(buffer, p, n);
    return load_bytes(buffer);
}
INLINE bytes as_weight(bytes w) { return w; }
#endif

// Four channels of the 16 weights of a panel, and their products with four channels of a row: QUADS sums, which `gather_quads`
// turns into one for each weight.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int QUADS = 1;
INLINE void load_quads(const int8_t* w, bytes* out) { out[0] = as_weight(load_bytes(w)); }
INLINE bytes spread(i32 four) { return _mm512_set1_epi32(four); }
INLINE void gather_quads(const ivec* acc, ivec* out) { out[0] = acc[0]; }
#elif defined(__AVX512BW__)
constexpr int QUADS = 2;
INLINE bytes spread(i32 four) { return _mm512_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four))); }
INLINE void gather_quads(const ivec* acc, ivec* out) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i a = (__m512i)acc[0], b = (__m512i)acc[1];
    out[0] = (ivec)_mm512_permutex2var_epi32(a, even, b) +
             (ivec)_mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
#elif defined(__AVX2__)
constexpr int QUADS = 4;
INLINE bytes spread(i32 four) { return _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four))); }
INLINE void gather_quads(const ivec* acc, ivec* out) {
    for (int p = 0; p < PARTS; ++p) {
        __m256i pairs = _mm256_hadd_epi32((__m256i)acc[2 * p], (__m256i)acc[2 * p + 1]);
        out[p] = (ivec)_mm256_permute4x64_epi64(pairs, 0xd8);
    }
}
#else
constexpr int QUADS = 16;  // one weight each: its four products are added up at the end
INLINE void load_quads(const int8_t* w, bytes* out) {
    for (int j = 0; j < QUADS; ++j) out[j] = load_bytes(w + j * STEP);
}
INLINE bytes spread(i32 four) {
    int8_t x[4];
    memcpy(x, &four, 4);
    return bytes{x[0], x[1], x[2], x[3]};
}
INLINE void gather_quads(const ivec* acc, ivec* out) {
    for (int p = 0; p < PARTS; ++p)
        for (int j = 0; j < LANES; ++j) {
            ivec four = acc[p * LANES + j];
            out[p][j] = four[0] + four[1] + four[2] + four[3];
        }
}
#endif
#if defined(__AVX2__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__))
INLINE void load_quads(const int8_t* w, bytes* out) {
    for (int j = 0; j < QUADS; ++j) out[j] = load_bytes(w + j * STEP);
}
#endif

// The same for int8: exact sums, times the factor of the row.
template <int R> INLINE vec tile(Rows<int8_t> x, i64 rows, const int8_t* const* w, i64 cols, i64 k) {
    constexpr int C = LANES / R;
    const int8_t* xs[R];
    const int8_t* ws[C];
    for (int r = 0; r < R; ++r) xs[r] = x.at[std::min<i64>(r, rows - 1)];
    for (int c = 0; c < C; ++c) ws[c] = w[std::min<i64>(c, cols - 1)];
    ivec acc[LANES] = {};
    auto step = [&](const auto& fetch) FLAT {
        bytes xv[R];
        for (int r = 0; r < R; ++r) xv[r] = fetch(xs[r]);
        for (int c = 0; c < C; ++c) {
            bytes wv = as_weight(fetch(ws[c]));
            for (int r = 0; r < R; ++r) acc[r * C + c] = dot(acc[r * C + c], xv[r], wv);
        }
    };
    i64 i = 0;
    for (; i + STEP <= k; i += STEP) step([&](const int8_t* p) FLAT { return load_bytes(p + i); });
    if (i < k) step([&](const int8_t* p) FLAT { return load_bytes(p + i, k - i); });
    ivec total = fold_all(acc);
    vec scale;
    for (int j = 0; j < LANES; ++j) {
        i64 r = std::min<i64>(j / C, rows - 1);
        scale[j] = x.scale[r];
        if (OFFSET) total[j] -= OFFSET * x.sum[r];
    }
    return __builtin_convertvector(total, vec) * scale;
}

constexpr i64 PANEL = 16;  // weights kept close while the rows pass

template <int R, class W>
INLINE void row_block(Rows<W> x, i64 rows, const W* const* w, i64 cols, i64 k, float* out, i64 ld) {
    constexpr int C = LANES / R;
    for (i64 c = 0; c < cols; c += C) {
        float part[LANES];
        store(part, tile<R>(x, rows, w + c, cols - c, k));
        for (i64 r = 0; r < std::min<i64>(R, rows); ++r) memcpy(out + r * ld + c, part + r * C, 4 * std::min<i64>(C, cols - c));
    }
}

template <class W>
__attribute__((noinline)) void panel(Rows<W> x, i64 n, const W* const* w, i64 cols, i64 k, float* out, i64 ld) {
    for (i64 r = 0; r < n; r += 4) {
        i64 left = n - r;
        float* to = out + r * ld;
        if (left > 2)
            row_block<4>(x.from(r), left, w, cols, k, to, ld);
        else if (left == 2)
            row_block<2>(x.from(r), left, w, cols, k, to, ld);
        else
            row_block<1>(x.from(r), left, w, cols, k, to, ld);
    }
}

// out[r, c] = x[r] . w[c] for n rows and `cols` weights (times the row's factor for int8).
template <class W> void dots(Rows<W> x, i64 n, const W* const* w, i64 cols, i64 k, float* out, i64 ld) {
    for (i64 c = 0; c < cols; c += PANEL) panel(x, n, w + c, std::min(PANEL, cols - c), k, out + c, ld);
}

// A matrix [width, k]: rows at stride ld, or panels of 16 rows (`cpu_params.py`) at stride ld.
template <class W> struct Matrix {
    const W* data;
    i64 ld;
    bool panels;
    const W* panel(i64 row) const { return data + row / PANEL * ld; }
    // Its channels from the k-th on, of int8 panels only.
    Matrix channels(i64 k) const { return {data + (panels ? k * PANEL : k), ld, panels}; }
};

// out[r][p]: x[r] . the 16 weights of panel p. A panel holds all channels = k (mod 8), in pairs, for one k after the other; the
// sums of each k are kept apart, G of them in registers at a time, and added up as `fold` does.
template <int R, int P, int G>
INLINE void panel_tile(Rows<float> x, i64 rows, const float* w, i64 ld, i64 k, vec (*out)[P][PARTS]) {
    const float* xs[R];
    for (int r = 0; r < R; ++r) xs[r] = x.at[std::min<i64>(r, rows - 1)];
    vec half[8][R][P][PARTS];
    for (int g = 0; g < 8; g += G) {
        vec acc[G][2][R][P][PARTS] = {};
        for (i64 i = 0; i < k; i += 16)
            for (int a = 0; a < G; ++a) {
                const float* at = w + ((g + a) * (k / 8) + i / 8) * PANEL;
                vec wv[P][PARTS][2];
                for (int p = 0; p < P; ++p)
                    for (int v = 0; v < PARTS; ++v)
                        for (int b = 0; b < 2; ++b) wv[p][v][b] = load(at + p * ld + b * PANEL + v * LANES);
                for (int b = 0; b < 2; ++b)
                    for (int r = 0; r < R; ++r) {
                        vec xv = splat(xs[r][i + g + a + 8 * b]);
                        for (int p = 0; p < P; ++p)
                            for (int v = 0; v < PARTS; ++v) acc[a][b][r][p][v] = fma(xv, wv[p][v][b], acc[a][b][r][p][v]);
                    }
            }
        for (int a = 0; a < G; ++a)
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p)
                    for (int v = 0; v < PARTS; ++v) half[g + a][r][p][v] = acc[a][0][r][p][v] + acc[a][1][r][p][v];
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            for (int v = 0; v < PARTS; ++v) {
                auto quarter = [&](int g) FLAT { return half[g][r][p][v] + half[g + 4][r][p][v]; };
                out[r][p][v] = (quarter(0) + quarter(2)) + (quarter(1) + quarter(3));
            }
}

// The same for bf16, in the order of the matrix unit: over 32 channels, the even ones and the odd ones each one after the other,
// then the two sums to the total. (The unit takes denormals for zero.)
template <int R, int P, int G>
INLINE void panel_tile(Rows<bf16> x, i64 rows, const bf16* w, i64 ld, i64 k, vec (*out)[P][PARTS]) {
    const bf16* xs[R];
    for (int r = 0; r < R; ++r) xs[r] = x.at[std::min<i64>(r, rows - 1)];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            for (int v = 0; v < PARTS; ++v) out[r][p][v] = vec{};
    for (i64 first = 0; first < k; first += 32) {
        vec acc[2][R][P][PARTS] = {};
        for (i64 i = first; i < std::min(k, first + 32); i += 2) {
            uvec both[P][PARTS];
            for (int p = 0; p < P; ++p)
                for (int v = 0; v < PARTS; ++v) memcpy(&both[p][v], w + p * ld + i * PANEL + 2 * v * LANES, sizeof(uvec));
            for (int r = 0; r < R; ++r) {
                vec even = splat(get(xs[r] + i)), odd = splat(i + 1 < k ? get(xs[r] + i + 1) : 0.0f);
                for (int p = 0; p < P; ++p)
                    for (int v = 0; v < PARTS; ++v) {
                        acc[0][r][p][v] = fma(even, (vec)(both[p][v] << 16), acc[0][r][p][v]);
                        acc[1][r][p][v] = fma(odd, (vec)(both[p][v] & 0xffff0000u), acc[1][r][p][v]);
                    }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                for (int v = 0; v < PARTS; ++v) out[r][p][v] += acc[0][r][p][v] + acc[1][r][p][v];
    }
}

// The same for int8, in CHAINS exact sums.
template <int R, int P, int G>
INLINE void panel_tile(Rows<int8_t> x, i64 rows, const int8_t* w, i64 ld, i64 k, vec (*out)[P][PARTS]) {
    constexpr int CHAINS = R * P * QUADS < 8 ? 8 / (R * P * QUADS) : 1;
    const int8_t* xs[R];
    for (int r = 0; r < R; ++r) xs[r] = x.at[std::min<i64>(r, rows - 1)];
    ivec acc[CHAINS][R][P][QUADS] = {};
    auto step = [&](i64 i, ivec (*sums)[P][QUADS]) FLAT {
        bytes wv[P][QUADS];
        for (int p = 0; p < P; ++p) load_quads(w + p * ld + i * PANEL, wv[p]);
        for (int r = 0; r < R; ++r) {
            i32 four;
            memcpy(&four, xs[r] + i, 4);
            bytes xv = spread(four);
            for (int p = 0; p < P; ++p)
                for (int j = 0; j < QUADS; ++j) sums[r][p][j] = dot(sums[r][p][j], xv, wv[p][j]);
        }
    };
    i64 i = 0;
    for (; i + 4 * CHAINS <= k; i += 4 * CHAINS)
        for (int c = 0; c < CHAINS; ++c) step(i + 4 * c, acc[c]);
    for (; i < k; i += 4) step(i, acc[0]);
    for (int r = 0; r < R; ++r) {
        i64 row = std::min<i64>(r, rows - 1);
        for (int p = 0; p < P; ++p) {
            for (int c = 1; c < CHAINS; ++c)
                for (int j = 0; j < QUADS; ++j) acc[0][r][p][j] += acc[c][r][p][j];
            ivec total[PARTS];
            gather_quads(acc[0][r][p], total);
            for (int v = 0; v < PARTS; ++v) {
                if (OFFSET) total[v] -= OFFSET * x.sum[row];
                out[r][p][v] = __builtin_convertvector(total[v], vec) * x.scale[row];
            }
        }
    }
}

template <int R, int P, class W>
INLINE void panel_block(Rows<W> x, i64 rows, const W* w, i64 ldw, i64 cols, i64 k, float* out, i64 ld) {
    auto some = [&](i64 c, auto panels) FLAT {
        constexpr int N = decltype(panels)::value;
        vec part[R][N][PARTS];
        panel_tile<R, N, (R > 2 ? 1 : 2)>(x, rows, w + c / PANEL * ldw, ldw, k, part);
        for (i64 r = 0; r < std::min<i64>(R, rows); ++r)
            for (int p = 0; p < N; ++p)
                for (int v = 0; v < PARTS; ++v) store(out + r * ld + c + p * PANEL + v * LANES, part[r][p][v]);
    };
    i64 c = 0;
    for (; c + P * PANEL <= cols; c += P * PANEL) some(c, std::integral_constant<int, P>{});
    if constexpr (P > 1)
        for (; c < cols; c += PANEL) some(c, std::integral_constant<int, 1>{});
}

#if defined(TILES)
// The matrix unit (AMX): 16 x 16 sums over 64 channels of int8, or 32 of bf16, in one instruction. These channels of a panel are a
// tile as they lie.
constexpr i64 TILE_ROWS = 16, TILE_BYTES = 64;
template <class W> constexpr i64 TILE_CHANNELS = TILE_BYTES / sizeof(W);

// Whether this process may use it: the kernel must be asked, and some hypervisors say no.
const bool tiles_allowed = [] {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    const char* off = getenv("DSV4_NO_AMX");
    return !(off && *off) && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}();

// Registers for blocks of `rows` <= 16 rows: 0..3 sums [row block][panel], 4..5 rows, 6..7 panels. Configuring takes as long as
// a small product, so the shape stays until another is wanted, or until the thread is done with its piece (`TileUse`): a
// register file that is released costs nothing at a context switch.
thread_local i64 tile_rows = 0;

INLINE void shape_tiles(i64 rows) {
    if (rows == tile_rows) return;
    struct alignas(64) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = TILE_BYTES, shape.rows[i] = i < 6 ? rows : TILE_ROWS;
    _tile_loadconfig(&shape);
    tile_rows = rows;
}

struct TileUse {
    ~TileUse() {
        if (!tile_rows) return;
        _tile_release();
        tile_rows = 0;
    }
};

// What `panel_dots` computes otherwise, bit for bit: integer sums have no order, and bf16 is added up as here.
template <class W>
__attribute__((noinline)) void tile_dots(Rows<W> x, i64 n, const W* w, i64 ldw, i64 cols, i64 k, float* out, i64 ld) {
    constexpr bool exact = std::is_same_v<W, int8_t>;
    const i64 step = n > 1 ? x.at[1] - x.at[0] : k;
    bool even = true;
    for (i64 r = 2; r < n; ++r) even &= x.at[r] - x.at[r - 1] == step;
    SCRATCH(W, gathered, even ? 0 : n * k);
    if (!even)
        for (i64 r = 0; r < n; ++r) memcpy(gathered + r * k, x.at[r], k * sizeof(W));
    const W* rows = even ? x.at[0] : gathered;
    const i64 pitch = even ? step : k, bytes = pitch * sizeof(W);
    alignas(64) i32 sums[TILE_ROWS * PANEL];
    auto finish = [&](i64 r, i64 count, i64 c) FLAT {
        if constexpr (exact)
            for (i64 i = 0; i < count; ++i)
                store(out + (r + i) * ld + c,
                      __builtin_convertvector(*reinterpret_cast<const ivec*>(sums + i * PANEL), vec) * x.scale[r + i]);
    };
#define TILE_DOT(sum, row, panel) \
    if constexpr (exact) \
        _tile_dpbssd(sum, row, panel); \
    else \
        _tile_dpbf16ps(sum, row, panel)
#define TILE_STORE(sum, r, c) \
    if constexpr (exact) \
        _tile_stored(sum, sums, TILE_BYTES); \
    else \
        _tile_stored(sum, out + (r) * ld + (c), ld * 4); \
    finish(r, count, c)
    auto blocks = [&](i64 r, i64 count, bool two_rows) FLAT {
        const W* a = rows + r * pitch;
        const i64 half = TILE_ROWS * pitch;
        for (i64 c = 0; c < cols; c += 2 * PANEL) {
            const bool two = c + PANEL < cols;
            const W *left = w + c / PANEL * ldw, *right = left + (two ? ldw : 0);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (i64 i = 0; i < k; i += TILE_CHANNELS<W>) {
                _tile_loadd(6, left + i * PANEL, TILE_BYTES);
                _tile_loadd(7, right + i * PANEL, TILE_BYTES);
                _tile_loadd(4, a + i, bytes);
                TILE_DOT(0, 4, 6);
                TILE_DOT(1, 4, 7);
                if (two_rows) {
                    _tile_loadd(5, a + half + i, bytes);
                    TILE_DOT(2, 5, 6);
                    TILE_DOT(3, 5, 7);
                }
            }
            TILE_STORE(0, r, c);
            if (two) {
                TILE_STORE(1, r, c + PANEL);
            }
            if (!two_rows) continue;
            TILE_STORE(2, r + TILE_ROWS, c);
            if (two) {
                TILE_STORE(3, r + TILE_ROWS, c + PANEL);
            }
        }
    };
#undef TILE_DOT
#undef TILE_STORE
    i64 r = 0;
    if (n >= TILE_ROWS) {
        shape_tiles(TILE_ROWS);
        for (; r + 2 * TILE_ROWS <= n; r += 2 * TILE_ROWS) blocks(r, TILE_ROWS, true);
        for (; r + TILE_ROWS <= n; r += TILE_ROWS) blocks(r, TILE_ROWS, false);
    }
    if (r < n) {
        shape_tiles(n - r);
        blocks(r, n - r, false);
    }
}
#else
struct TileUse {};
#endif

// Blocks that fill the registers: wide machines have 32 for 16 lanes, the others fewer lanes and a panel in several parts.
template <class W>
__attribute__((noinline)) void panel_dots(Rows<W> x, i64 n, const W* w, i64 ldw, i64 cols, i64 k, float* out, i64 ld) {
    constexpr bool wide = LANES == 16;
#if defined(TILES)
    if constexpr (!std::is_same_v<W, float>) {
        constexpr i64 least_rows = std::is_same_v<W, int8_t> ? 3 : 1;
        if (n >= least_rows && k % TILE_CHANNELS<W> == 0 && tiles_allowed) return tile_dots(x, n, w, ldw, cols, k, out, ld);
    }
#endif
    auto block = [&](i64 r, auto rows) FLAT {
        panel_block<decltype(rows)::value, wide ? 2 : 1>(x.from(r), n - r, w, ldw, cols, k, out + r * ld, ld);
    };
    i64 r = 0;
    if constexpr (wide && std::is_same_v<W, int8_t>)
        for (; n - r > 4; r += 8) block(r, std::integral_constant<int, 8>{});
    if constexpr (wide)
        for (; n - r > 2; r += 4) block(r, std::integral_constant<int, 4>{});
    for (; n - r > 1; r += 2) block(r, std::integral_constant<int, 2>{});
    for (; r < n; ++r) block(r, std::integral_constant<int, 1>{});
}

// bf16 rows are laid in panels first, for the sake of the order.
template <> void dots(Rows<bf16> x, i64 n, const bf16* const* w, i64 cols, i64 k, float* out, i64 ld) {
    SCRATCH(bf16, panel, PANEL*(k + k % 2));
    SCRATCH(float, part, n* PANEL);
    for (i64 c = 0; c < cols; c += PANEL) {
        i64 width = std::min(PANEL, cols - c);
        std::fill(panel, panel + PANEL * (k + k % 2), bf16{});
        for (i64 j = 0; j < width; ++j)
            for (i64 i = 0; i < k; ++i) panel[(i / 2 * PANEL + j) * 2 + i % 2] = w[c + j][i];
        panel_dots(x, n, panel, 0, PANEL, k, part, PANEL);
        for (i64 r = 0; r < n; ++r) memcpy(out + r * ld + c, part + r * PANEL, width * sizeof(float));
    }
}

// out[r, c] = x[r] . w[first + c]; a multiple of 16 where the matrix has panels.
template <class W>
void dots(Rows<W> x, i64 n, Matrix<W> w, i64 first, i64 cols, i64 k, float* out, i64 ld) {
    if (w.panels) return panel_dots(x, n, w.panel(first), w.ld, cols, k, out, ld);
    const W* ws[PANEL];
    for (i64 c = 0; c < cols; c += PANEL) {
        i64 count = std::min(PANEL, cols - c);
        for (i64 j = 0; j < count; ++j) ws[j] = w.data + (first + c + j) * w.ld;
        dots(x, n, ws, count, k, out + c, ld);
    }
}

// Per-row int8 with ties to even; returns the factor back. Twice the same bits as `plain.quantise`.
__attribute__((noinline)) float quantise_row(const float* x, i64 k, int8_t* q, i32* total) {
    vec top = {};
    each(k, [&](i64 i, i64 m) { top = max(top, abs(load(x + i, m))); });
    float amax = std::max(1e-4f, greatest(top));
    float factor = (1.0f / amax) * 127.0f;
    ivec sums = {};
    each(k, [&](i64 i, i64 m) {
        vec shifted = load(x + i, m) * factor + 12582912.0f;  // the low bits of the mantissa are the rounded integer
        ivec value = (ivec)shifted - 0x4b400000;
        sums += value;
        qvec narrow = __builtin_convertvector(__builtin_convertvector(value, svec), qvec);
        if (m == LANES)
            memcpy(q + i, &narrow, sizeof narrow);
        else
            memcpy(q + i, &narrow, m);
    });
    *total = over_lanes(sums, [](ivec a, ivec b) FLAT { return a + b; })[0];
    return amax / 127.0f;
}

constexpr i64 ROWS = 64, COLS = 32;  // the piece of a product that one task makes


// Splits an n x width product into tasks body(row, rows, column, columns).
template <class F> void tasks(i64 n, i64 width, i64 k, const F& body) {
    i64 tall = (n + ROWS - 1) / ROWS, wide = (width + COLS - 1) / COLS;
    parallel(tall * wide, double(std::min(n, ROWS) + 2) * COLS * k / 16, [&](i64 begin, i64 end) {
        [[maybe_unused]] TileUse use;
        for (i64 task = begin; task < end; ++task) {
            i64 r = task / wide * ROWS, c = task % wide * COLS;
            body(r, std::min(ROWS, n - r), c, std::min(COLS, width - c));
        }
    });
}

// out[r, c] = x[r] . w[c], float or bf16 weights.
template <class W>
void product(Strided<W> x, i64 n, i64 k, Matrix<W> w, i64 width, float* out, i64 ldo) {
    SCRATCH(const W*, rows, n);
    for (i64 r = 0; r < n; ++r) rows[r] = x[r];
    tasks(n, width, k, [=](i64 r, i64 count, i64 c, i64 cols) {
        dots(Rows<W>{rows + r}, count, w, c, cols, k, out + r * ldo + c, ldo);
    });
}

// A row of `d` floats times `factor` (times gamma), its trailing channels rotated, stored as T. `turn` holds cos of each pair
// twice, then -sin | sin of each pair.
template <class T>
INLINE void rope_row(const float* x, i64 d, float factor, const float* gamma, const float* turn, i64 r, T* out) {
    auto scaled = [&](i64 i, i64 m) FLAT {
        vec v = load(x + i, m) * factor;
        return gamma ? v * load(gamma + i, m) : v;
    };
    i64 keep = d - r;
    each(keep, [&](i64 i, i64 m) { store(out + i, scaled(i, m), m); });
    each(r, [&](i64 i, i64 m) {
        vec v = scaled(keep + i, m);
        vec w = swap_lanes<1>(v, Lanes{});
        store(out + keep + i, v * load(turn + i, m) + w * load(turn + r + i, m), m);
    });
}

// cos | sin of position `t` of a table as `rope_row` wants them; `sign` -1 rotates back.
void expand_turn(const void* cos_sin, i64 dtype, i64 offset, i64 r, float sign, float* turn) {
    with_float(dtype, [&](auto* tag) {
        auto from = static_cast<decltype(tag)>(cos_sin) + offset;
        for (i64 j = 0; j < r / 2; ++j) {
            float cos = get(from + j), sin = get(from + r / 2 + j) * sign;
            turn[2 * j] = turn[2 * j + 1] = cos;
            turn[r + 2 * j] = -sin;
            turn[r + 2 * j + 1] = sin;
        }
    });
}

INLINE float norm_factor(float squares, i64 n, float eps) { return 1.0f / std::sqrt(squares / float(n) + eps); }

// The lowest index of the greatest value; `at(i, n)` gives the values from i on.
struct Best {
    float value = -INFINITY;
    i64 index = -1;
    void add(float v, i64 i) {
        if (index < 0 || v > value || (v == value && i < index)) value = v, index = i;
    }
};

// The best of some lanes; index -1 in a lane means that it has seen nothing.
__attribute__((noinline)) Best best_lane(const float* value, const i32* index) {
    Best best;
    for (int j = 0; j < LANES; ++j)
        if (index[j] >= 0) best.add(value[j], index[j]);
    return best;
}

template <class F> INLINE Best best_of(i64 count, const F& at) {
    vec top = splat(-INFINITY);
    ivec where = ivec{} - 1, lane;
    for (int j = 0; j < LANES; ++j) lane[j] = j;
    for (i64 i = 0; i < count; i += LANES) {
        vec v = at(i, std::min<i64>(LANES, count - i));
        ivec better = (v > top) & (lane + i32(i) < i32(count));
        top = better ? v : top;
        where = better ? lane + i32(i) : where;
    }
    float value[LANES];
    i32 index[LANES];
    memcpy(value, &top, sizeof top);
    memcpy(index, &where, sizeof where);
    return best_lane(value, index);
}

// ---- hyper-connections ----------------------------------------------------------------------------------------------------

constexpr i64 MAX_STREAMS = 8;

// Calls f with the number of streams as a constant if it is the released one, so that loops over streams unroll.
template <class F> INLINE void with_streams(i64 m, const F& f) {
    if (m == 4)
        f(std::integral_constant<i64, 4>{});
    else
        f(m);
}

// mix[c][lane] = the logits of the LANES tokens from t on: streams . fn, over the root mean square of all streams.
INLINE void mix_logits(const float* streams, i64 t, i64 n, i64 size, const float* fn, i64 rows, float eps, vec* mix) {
    const float *xs[LANES], *ws[(MAX_STREAMS + 2) * MAX_STREAMS];
    float out[LANES * (MAX_STREAMS + 2) * MAX_STREAMS];
    for (i64 j = 0; j < n; ++j) xs[j] = streams + (t + j) * size;
    for (i64 c = 0; c < rows; ++c) ws[c] = fn + c * size, mix[c] = vec{};
    dots(Rows<float>{xs}, n, ws, rows, size, out, rows);
    for (i64 j = 0; j < n; ++j) {
        float factor = norm_factor(sum_squares(xs[j], size), size, eps);
        for (i64 c = 0; c < rows; ++c) mix[c][j] = out[j * rows + c] * factor;
    }
}

// sum_i weight[i][lane] * stream i of one token, rounded to `dtype` and kept in float.
INLINE void collapse(const float* streams, i64 m, i64 d, const vec* weight, i64 lane, i64 dtype, float* out) {
    float share[MAX_STREAMS];
    for (i64 s = 0; s < m; ++s) share[s] = weight[s][lane];
    with_streams(m, [&](auto count) FLAT {
        each(d, [&](i64 i, i64 n) FLAT {
            vec total = {};
            for (i64 s = 0; s < count; ++s) total = fma(splat(share[s]), load(streams + s * d + i, n), total);
            store(out + i, dtype == BF16 ? round_bf16(total) : total, n);
        });
    });
}

INLINE void norm_row(const float* x, i64 d, const float* gamma, float eps, float* out) {
    float factor = norm_factor(sum_squares(x, d), d, eps);
    each(d, [&](i64 i, i64 n) { store(out + i, load(x + i, n) * factor * load(gamma + i, n), n); });
}

// M is the number of streams, or 0 for any. The matrices of LANES tokens are worked on at once, one per lane.
template <int M> INLINE void sinkhorn(vec* comb, i64 streams, i64 iters, float eps) {
    const i64 m = M ? M : streams;
    for (i64 i = 0; i < m; ++i) {
        vec top = comb[i * m], total = {};
        for (i64 o = 1; o < m; ++o) top = max(top, comb[i * m + o]);
        for (i64 o = 0; o < m; ++o) total += comb[i * m + o] = exp(comb[i * m + o] - top);
        for (i64 o = 0; o < m; ++o) comb[i * m + o] = comb[i * m + o] / total + eps;
    }
    auto normalise = [&](i64 step, i64 along) FLAT {
        for (i64 a = 0; a < m; ++a) {
            vec total = comb[a * step];
            for (i64 b = 1; b < m; ++b) total += comb[a * step + b * along];
            vec factor = 1.0f / (total + eps);
            for (i64 b = 0; b < m; ++b) comb[a * step + b * along] *= factor;
        }
    };
    normalise(1, m);
    for (i64 i = 1; i < iters; ++i) normalise(m, 1), normalise(1, m);
}

// The tokens of one block: LANES of them fill the lanes, fewer leave work for the other thread.
INLINE i64 token_block(i64 n) { return clamp((n + thread_limit - 1) / thread_limit, 1, LANES); }

// ---- cache addressing -----------------------------------------------------------------------------------------------------

constexpr i64 PAGE_HISTORY = 128, PAGE_WINDOW = 32, PAGE_TAIL = 8, PAGE_OPEN = 32;

struct Ring {
    const i32* table;
    i64 columns, page;
    i32 operator()(i64 row, i64 position) const {
        if (position < 0) return -1;
        return i32(table[row * columns + position / page % columns] * page + position % page);
    }
    // Of `count` positions from `first` on: a division per page, not per position.
    void list(i64 row, i64 first, i64 count, i32* out) const {
        i64 i = std::min(std::max<i64>(-first, 0), count);
        std::fill(out, out + i, -1);
        while (i < count) {
            i32 at = (*this)(row, first + i);
            i64 stop = std::min(count, i + page - at % page);
            for (; i < stop; ++i) out[i] = at++;
        }
    }
};

// Slots, rows and starts of the windows of `ratio` tokens that close in a row; each pools its last `reach` tokens.
struct Closings {
    i32 *slots, *rows, *starts;
    i64 ratio, reach;
    Ring ring;
    void fill(i64 r, i64 start, i64 length, i64 query_len, const i32* history, i64 pages) const {
        i64 count = (query_len + ratio - 1) / ratio, per_page = PAGE_HISTORY / ratio;
        for (i64 j = 0; j < count; ++j) {
            i64 w = floor_div(start, ratio) + j, at = r * count + j;
            bool closes = w * ratio + ratio <= start + length;
            i64 column = clamp(floor_div(w, per_page), 0, pages - 1);
            slots[at] = closes ? i32(history[r * pages + column] * per_page + w % per_page) : 0;
            starts[at] = closes ? i32(w * ratio) : -1;
            if (closes)
                ring.list(r, w * ratio + ratio - reach, reach, rows + at * reach);
            else
                std::fill(rows + at * reach, rows + (at + 1) * reach, -1);
        }
    }
};

void addresses(Args a) {
    auto start = a.tensor<const i32>(), length = a.tensor<const i32>(), history = a.tensor<const i32>();
    auto window_table = a.tensor<const i32>(), tail_table = a.tensor<const i32>(), open_table = a.tensor<const i32>();
    auto positions = a.tensor<i32>(), window_slots = a.tensor<i32>(), tail_slots = a.tensor<i32>();
    auto open_slots = a.tensor<i32>(), window_rows = a.tensor<i32>();
    auto csa_slots = a.tensor<i32>(), csa_rows = a.tensor<i32>(), csa_starts = a.tensor<i32>();
    auto hca_slots = a.tensor<i32>(), hca_rows = a.tensor<i32>(), hca_starts = a.tensor<i32>();
    auto csa_visible = a.tensor<i32>(), hca_visible = a.tensor<i32>();
    i64 n = a.size(), pages = a.size();
    Ring window{window_table, a.size(), PAGE_WINDOW}, tail{tail_table, a.size(), PAGE_TAIL};
    Ring open{open_table, a.size(), PAGE_OPEN};
    i64 query_len = a.size(), width = a.size();
    Closings csa{csa_slots, csa_rows, csa_starts, 4, 8, tail}, hca{hca_slots, hca_rows, hca_starts, 128, 128, open};
    parallel(n, double(query_len) * width * 4 + 200, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            for (i64 s = 0; s < query_len; ++s) {
                i64 t = r * query_len + s, p = s < length[r] ? start[r] + s : -1;
                positions[t] = i32(p);
                window_slots[t] = std::max(window(r, p), 0);
                tail_slots[t] = std::max(tail(r, p), 0);
                open_slots[t] = std::max(open(r, p), 0);
                csa_visible[t] = i32(floor_div(p + 1, 4));
                hca_visible[t] = i32(floor_div(p + 1, 128));
                if (p < 0)
                    std::fill(window_rows + t * width, window_rows + (t + 1) * width, -1);
                else
                    window.list(r, p - width + 1, width, window_rows + t * width);
            }
            csa.fill(r, start[r], length[r], query_len, history, pages);
            hca.fill(r, start[r], length[r], query_len, history, pages);
        }
    });
}

// ---- compression and attention ------------------------------------------------------------------------------------------------

template <class T> void compress(Args a) {
    auto state = a.tensor<const float>();
    auto rows = a.tensor<const i32>();
    auto norm = a.tensor<const void>(), cos_sin = a.tensor<const void>();
    auto out = a.tensor<T>();
    i64 n = a.size(), pool = a.size(), m = a.size(), d = a.size(), width = a.size(), r = a.size(), ld = a.size();
    const float* gamma = float_rows<float>(norm, a.size(), 1, d, d)[0];
    i64 turn_dtype = a.size();
    float eps = a.real();
    bool overlap = width == 4 * d;
    i64 gates = width / 2;
    parallel(n, double(m) * d, [&](i64 begin, i64 end) {
        SCRATCH(float, entry, d + 2 * r);
        SCRATCH(const float*, items, m);
        for (i64 e = begin; e < end; ++e) {
            i64 count = 0;
            for (i64 j = 0; j < m; ++j) {
                i64 row = rows[e * m + j];
                if (inside(row, pool)) items[count++] = state + row * width + (overlap && j >= m / 2 ? d : 0);
            }
            if (!count) {
                memset(static_cast<void*>(out + e * d), 0, d * sizeof(T));
                continue;
            }
            each(d, [&](i64 i, i64 w) {
                vec top = load(items[0] + gates + i, w), weights = {}, total = {};
                for (i64 j = 1; j < count; ++j) top = max(top, load(items[j] + gates + i, w));
                for (i64 j = 0; j < count; ++j) {
                    vec p = exp(load(items[j] + gates + i, w) - top);
                    weights += p;
                    total = fma(p, load(items[j] + i, w), total);
                }
                store(entry + i, total / weights, w);
            });
            expand_turn(cos_sin, turn_dtype, e * ld, r, 1.0f, entry + d);
            rope_row(entry, d, norm_factor(sum_squares(entry, d), d, eps), gamma, entry + d, r, out + e * d);
        }
    });
}

template <int H, int... J> INLINE vec butterfly(vec v, std::integer_sequence<int, J...> lanes) {
    return swap_lanes<H>(v, lanes) + v * vec{(J & H ? -1.0f : 1.0f)...};
}

template <int H> INLINE vec butterflies(vec v) {
    v = butterfly<H>(v, Lanes{});
    if constexpr (2 * H < LANES)
        return butterflies<2 * H>(v);
    else
        return v;
}

// The Sylvester-Hadamard transform of d = 2^n floats, not normalised.
INLINE void hadamard(float* x, i64 d) {
    i64 half = 1;
    if (d >= LANES) {
        each(d, [&](i64 i, i64) { store(x + i, butterflies<1>(load(x + i))); });
        half = LANES;
    }
    for (; half < d; half *= 2)
        for (i64 i = 0; i < d; i += 2 * half)
            for (i64 j = i; j < i + half; ++j) {
                float u = x[j], v = x[j + half];
                x[j] = u + v;
                x[j + half] = u - v;
            }
}

// The k-th greatest of n keys and how many are greater: a histogram per digit, from the top, of those still in question.
std::pair<uint32_t, i64> kth_greatest(const uint32_t* keys, i64 n, i64 k) {
    SCRATCH(uint32_t, left, n);
    uint32_t prefix = 0;
    i64 above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        i32 histogram[256] = {};
        for (i64 i = 0; i < n; ++i) ++histogram[keys[i] >> shift & 255];
        uint32_t digit = 255;
        while (above + histogram[digit] < k) above += histogram[digit--];
        prefix |= digit << shift;
        i64 kept = 0;
        for (i64 i = 0; i < n; ++i) {
            left[kept] = keys[i];
            kept += (keys[i] >> shift & 255) == digit;
        }
        keys = left, n = kept;
    }
    return {prefix, above};
}

constexpr int GROUP = 2 * LANES;  // keys that are turned and scored together; divides a page

// out[e] of GROUP keys: sum over heads, in order, of weight * relu(q . key * q_scale). Keys are turned: [d, GROUP].
INLINE void index_scores(const float* q, i64 heads, i64 d, const float* keys, const float* q_scale, const float* weights,
                         vec* out) {
    constexpr int R = LANES == 16 ? 8 : 4;
    out[0] = out[1] = vec{};
    for (i64 h = 0; h < heads; h += R) {
        vec dot[R][2] = {};
        const float* at[R];
        for (int r = 0; r < R; ++r) at[r] = q + std::min<i64>(h + r, heads - 1) * d;
        for (i64 i = 0; i < d; ++i) {
            vec low = load(keys + i * GROUP), high = load(keys + i * GROUP + LANES);
            for (int r = 0; r < R; ++r) {
                vec x = splat(at[r][i]);
                dot[r][0] = fma(x, low, dot[r][0]);
                dot[r][1] = fma(x, high, dot[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            if (h + r < heads)
                for (int v = 0; v < 2; ++v) out[v] += max(dot[r][v] * q_scale[h + r], vec{}) * weights[h + r];
    }
}

// The same for int8 queries and keys in the quads of a panel; exact sums, so the bits are those of the float form.
INLINE void index_scores(Rows<int8_t> q, i64 heads, i64 d, const int8_t* quads, const float* weights, float* dots, vec* out) {
    panel_dots(q, heads, quads, d * PANEL, GROUP, d, dots, GROUP);
    out[0] = out[1] = vec{};
    for (i64 h = 0; h < heads; ++h)
        for (int v = 0; v < 2; ++v) out[v] += max(load(dots + h * GROUP + v * LANES), vec{}) * weights[h];
}

// K: the type of keys. int8 products that are not of whole quads are summed in float32: exact for the d <= 1024 that
// `cpu_maths` allows.
template <class K> void index_topk(Args a) {
    auto q = a.tensor<const void>();
    auto q_scale = a.tensor<const float>(), weights = a.tensor<const float>();
    auto keys = a.tensor<const K>();
    auto key_scale = a.tensor<const float>();
    auto history = a.tensor<const i32>(), visible = a.tensor<const i32>();
    auto out = a.tensor<i32>();
    i64 n = a.size(), heads = a.size(), d = a.size(), pool = a.size(), rows = a.size(), pages = a.size(), k = a.size();
    i64 ld = a.size(), ld_head = a.size(), ld_weights = a.size(), q_dtype = a.size();
    float scale = a.real();
    constexpr i64 per_page = PAGE_HISTORY / 4, MOST = 8;
    i64 tokens = n / rows, entries = pages * per_page;

    auto entry_row = [=](i64 r, i64 e) {
        i64 row = i64(history[r * pages + e / per_page]) * per_page + e % per_page;
        return inside(row, pool) ? row : 0;
    };
    // Sort keys of entries begin .. end-1 (whole pages) for `count` tokens of row r from token t on.
    auto score = [=](i64 r, i64 t, i64 count, i64 begin, i64 end, uint32_t* scores) {
        SCRATCH(float, queries, count * heads * d);
        SCRATCH(float, weight, count * heads);
        SCRATCH(float, factor, count * heads);
        SCRATCH(float, turned, (d + LANES) * GROUP);
        const bool quads = std::is_same_v<K, int8_t> && LANES == 16 && q_dtype == I8 && d % 4 == 0;
        SCRATCH(const int8_t*, q_at, count * heads);
        SCRATCH(i32, q_sum, count * heads);
        SCRATCH(float, dots, heads* GROUP);
        for (i64 j = 0; j < count * heads; ++j) {
            i64 from = (t + j / heads) * ld + j % heads * ld_head;
            float* to = queries + j * d;
            if (quads) {
                q_at[j] = static_cast<const int8_t*>(q) + from;
                q_sum[j] = i32(sum(d, [&](i64 i, i64 m, vec acc) { return acc + load(q_at[j] + i, m); }));
            } else if (q_dtype == I8)
                copy_row(to, static_cast<const int8_t*>(q) + from, d);
            else
                with_float(q_dtype, [&](auto* tag) { copy_row(to, static_cast<decltype(tag)>(q) + from, d); });
            weight[j] = weights[(t + j / heads) * ld_weights + j % heads] * scale;
            factor[j] = q_scale ? q_scale[t * heads + j] : 1.0f;
        }
        for (i64 e = begin; e < end; e += GROUP) {
            i64 first = entry_row(r, e);
            // Rows of floats to columns; with quads, rows of words of four int8.
            const i64 width = quads ? d / 4 : d;
            for (i64 g = 0; g < GROUP; g += LANES)
                for (i64 i = 0; i < width; i += LANES) {
                    vec block[LANES];
                    for (int j = 0; j < LANES; ++j) {
                        const K* row = keys + (first + g + j) * d;
                        const i64 m = std::min<i64>(LANES, width - i);
                        block[j] = quads ? load(reinterpret_cast<const float*>(row) + i, m) : load(row + i, m);
                    }
                    transpose(block);
                    for (i64 j = 0; j < std::min<i64>(LANES, width - i); ++j)
                        store(quads ? turned + g * width + (i + j) * LANES : turned + (i + j) * GROUP + g, block[j]);
                }
            for (i64 j = 0; j < count; ++j) {
                i64 at = j * heads;
                vec found[2];
                if (quads)
                    index_scores(Rows<int8_t>{q_at + at, factor + at, q_sum + at}, heads, d,
                                 reinterpret_cast<const int8_t*>(turned), weight + at, dots, found);
                else
                    index_scores(queries + at * d, heads, d, turned, factor + at, weight + at, found);
                for (int v = 0; v < 2; ++v) {
                    vec value = key_scale ? found[v] * load(key_scale + first + v * LANES) : found[v];
                    ivec bits = (ivec)(value + 0.0f);  // -0 becomes 0: they tie
                    bits ^= bits >> 31 & 0x7fffffff;
                    memcpy(scores + j * entries + e + v * LANES, &(bits ^= INT32_MIN), sizeof bits);
                }
            }
        }
    };
    auto select = [=](i64 r, i64 t, const uint32_t* scores, i64 seen) {
        i32* to = out + t * k;
        i64 taken = 0;
        if (seen <= k) {
            for (; taken < seen; ++taken) to[taken] = i32(entry_row(r, taken));
        } else {
            auto [cut, above] = kth_greatest(scores, seen, k);
            i64 ties = k - above;
            for (i64 e = 0; taken < k; ++e) {
                bool tie = scores[e] == cut;
                to[taken] = i32(entry_row(r, e));
                taken += (scores[e] > cut) | (tie & (ties > 0));
                ties -= tie;
            }
        }
        std::fill(to + taken, to + k, -1);
    };

    i64 size = clamp((n + thread_limit - 1) / thread_limit, 1, std::min(tokens, MOST));  // tokens that share turned keys
    i64 per_row = (tokens + size - 1) / size, blocks = rows * per_row;
    double cost = double(heads) * d / LANES;
    auto run = [=](i64 block, bool split) {
        SCRATCH(uint32_t, scores, size * entries);
        i64 r = block / per_row, t = r * tokens + block % per_row * size;
        i64 count = std::min(size, (r + 1) * tokens - t), most = 0;
        for (i64 j = 0; j < count; ++j) most = std::max(most, clamp(visible[t + j], 0, entries));
        i64 seen_pages = most > k ? (most + per_page - 1) / per_page : 0;
        auto some = [=](i64 begin, i64 end) { score(r, t, count, begin * per_page, end * per_page, scores); };
        if (split)
            parallel(seen_pages, cost * count * per_page, some);
        else
            some(0, seen_pages);
        for (i64 j = 0; j < count; ++j) select(r, t + j, scores + j * entries, clamp(visible[t + j], 0, entries));
    };
    if (blocks < thread_limit)
        for (i64 b = 0; b < blocks; ++b) run(b, true);
    else
        parallel(blocks, cost * size * entries, [=](i64 begin, i64 end) {
            for (i64 b = begin; b < end; ++b) run(b, false);
        });
}

// out[h, :] = sum_j p[h][j] * keys[j][:] for R heads (the last repeated past `count`) and `width` channels from `from` on.
template <int R, int V>
INLINE void weigh(const float* const* p, i64 count, const float* const* keys, i64 n, i64 from, i64 width, float* out, i64 ld) {
    vec acc[R][V] = {};
    const float* ps[R];
    for (int r = 0; r < R; ++r) ps[r] = p[std::min<i64>(r, count - 1)];
    for (i64 j = 0; j < n; ++j)
        for (int v = 0; v < V; ++v) {
            vec key = load(keys[j] + from + v * LANES, V > 1 ? LANES : width);
            for (int r = 0; r < R; ++r) acc[r][v] = fma(splat(ps[r][j]), key, acc[r][v]);
        }
    for (i64 r = 0; r < std::min<i64>(R, count); ++r)
        for (int v = 0; v < V; ++v) store(out + r * ld + from + v * LANES, acc[r][v], V > 1 ? LANES : width);
}

INLINE i64 round16(i64 n) { return (n + 15) / 16 * 16; }

// Turns `n` rows of d floats into groups of 16 side by side, [groups, d, 16]; the last row fills the last group.
void turn_rows(const float* const* rows, i64 n, i64 d, float* groups) {
    for (i64 first = 0; first < n; first += PANEL, groups += PANEL * d)
        for (i64 g = 0; g < PANEL; g += LANES) {
            const float* at[LANES];
            for (i64 j = 0; j < LANES; ++j) at[j] = rows[std::min(first + g + j, n - 1)];
            for (i64 i = 0; i < d; i += LANES) {
                i64 count = std::min<i64>(LANES, d - i);
                vec block[LANES];
                for (int j = 0; j < LANES; ++j) block[j] = load(at[j] + i, count);
                transpose(block);
                for (i64 j = 0; j < count; ++j) store(groups + (i + j) * PANEL + g, block[j]);
            }
        }
}

// out[r][c]: x[r] . turned row c, channel after channel, for R rows of x and G groups.
template <int R, int G>
INLINE void score_tile(const float* const* x, i64 rows, const float* groups, i64 d, float* out, i64 ld) {
    const float* xs[R];
    for (int r = 0; r < R; ++r) xs[r] = x[std::min<i64>(r, rows - 1)];
    vec acc[R][G][PARTS] = {};
    for (i64 i = 0; i < d; ++i) {
        vec key[G][PARTS];
        for (int g = 0; g < G; ++g)
            for (int v = 0; v < PARTS; ++v) key[g][v] = load(groups + (g * d + i) * PANEL + v * LANES);
        for (int r = 0; r < R; ++r) {
            vec xv = splat(xs[r][i]);
            for (int g = 0; g < G; ++g)
                for (int v = 0; v < PARTS; ++v) acc[r][g][v] = fma(xv, key[g][v], acc[r][g][v]);
        }
    }
    for (i64 r = 0; r < std::min<i64>(R, rows); ++r)
        for (int g = 0; g < G; ++g)
            for (int v = 0; v < PARTS; ++v) store(out + r * ld + g * PANEL + v * LANES, acc[r][g][v]);
}

// out[r][g * 16 + j]: x[r] . row j of the turned group g. bf16 rows are turned by pairs of channels, which makes panels of them.
void score_rows(const bf16* const* x, i64 rows, const float* groups, i64 count, i64 d, float* out, i64 ld) {
    panel_dots(Rows<bf16>{x}, rows, reinterpret_cast<const bf16*>(groups), d * PANEL, count * PANEL, d, out, ld);
}
void score_rows(const float* const* x, i64 rows, const float* groups, i64 count, i64 d, float* out, i64 ld) {
    auto block = [&](i64 r, auto size) FLAT {
        constexpr int R = decltype(size)::value;
        i64 g = 0;
        for (; LANES == 16 && g + 2 <= count; g += 2)
            score_tile<R, 2>(x + r, rows - r, groups + g * d * PANEL, d, out + r * ld + g * PANEL, ld);
        for (; g < count; ++g) score_tile<R, 1>(x + r, rows - r, groups + g * d * PANEL, d, out + r * ld + g * PANEL, ld);
    };
    i64 r = 0;
    if constexpr (LANES == 16)
        for (; rows - r > 4; r += 8) block(r, std::integral_constant<int, 8>{});
    for (; r < rows; r += 4) block(r, std::integral_constant<int, 4>{});
}

// Rows of pools as they are and as floats, which are copies if they are bf16.
template <class K> struct Keys {
    const K** rows;
    const float** at;
    float* copies;
    i64 d, count;
    void add(const K* row) {
        rows[count] = row;
        if constexpr (std::is_same_v<K, float>) {
            at[count] = row;
        } else {
            at[count] = copies + count * d;
            copy_row(copies + count * d, row, d);
        }
        ++count;
    }
};

// K: dtype of q, keys and the result. Tokens whose windows are one list, or each the last one's moved on by a row, form a run:
// its keys are gathered and turned once. What a token gets does not depend on the run: scores are by key, sums by token.
template <class K> void attention(Args a) {
    auto q = a.tensor<const K>(), kv = a.tensor<const K>();
    auto kv_rows = a.tensor<const i32>();
    auto entries = a.tensor<const K>();
    auto entry_rows = a.tensor<const i32>(), entry_count = a.tensor<const i32>();
    auto sink = a.tensor<const float>();
    auto cos_sin = a.tensor<const void>();
    auto out = a.tensor<K>();
    i64 n = a.size(), heads = a.size(), d = a.size(), r = a.size(), ldq = a.size(), ldq_head = a.size(), ldc = a.size();
    i64 pool = a.size(), ld_pool = a.size(), kv_lead = a.size(), width = a.size();
    i64 entry_pool = a.size(), ld_entries = a.size(), entry_lead = a.size(), entry_width = a.size();
    i64 turn_dtype = a.size();
    float scale = a.real();
    constexpr int R = LANES == 8 ? 2 : 4, V = 4;
    const i64 block = clamp((n + thread_limit - 1) / thread_limit, 1, clamp(64 / heads, 1, 8));
    const i64 window_most = round16(width + block - 1), most = window_most + round16(entry_width);

    auto window_of = [=](i64 t) { return kv_rows + t / (n / kv_lead) * width; };
    auto entries_of = [=](i64 t) { return entry_rows + t / (n / entry_lead) * entry_width; };
    auto entries_seen = [=](i64 t) {
        return !entries ? 0 : entry_count ? clamp(entry_count[t], 0, entry_width) : entry_width;
    };
    // Tokens t .. t+m-1, whose windows move on by `shift` rows from one to the next.
    auto run = [=](i64 t, i64 m, i64 shift) {
        [[maybe_unused]] TileUse use;
        SCRATCH(const K*, rows, most + entry_width);
        SCRATCH(const float*, pointers, most + entry_width);
        SCRATCH(float, copies, most* d);
        SCRATCH(float, turned, most* d);
        SCRATCH(i64, before, width + block);
        SCRATCH(float, scores, m * heads * most);
        SCRATCH(float, shares, heads * (most + 16));
        SCRATCH(float, result, heads* d);
        SCRATCH(float, total, heads);
        SCRATCH(float, turn, 2 * r);
        SCRATCH(const K*, q_at, m * heads);
        SCRATCH(const float*, p_at, heads);
        SCRATCH(const float*, own, most);
        Keys<K> keys{rows, pointers, copies, d, 0};
        const i32* first = window_of(t);
        for (i64 j = 0; j < width + shift * (m - 1); ++j) {
            i64 row = j < width ? first[j] : window_of(t + j - width + 1)[width - 1];
            before[j] = keys.count;
            if (inside(row, pool)) keys.add(kv + row * ld_pool);
        }
        before[width + shift * (m - 1)] = keys.count;
        const i64 base = round16(keys.count);

        auto gather_entries = [&](const i32* list, i64 count, Keys<K>& to) {
            for (i64 j = 0; j < count; ++j)
                if (inside(list[j], entry_pool)) to.add(entries + list[j] * ld_entries);
        };
        // One list of entries serves all if each token's is the beginning of the longest.
        i64 longest = t;
        for (i64 i = t; i < t + m; ++i)
            if (entries_seen(i) > entries_seen(longest)) longest = i;
        const i64 seen = entries_seen(longest);
        bool shared = true;
        for (i64 i = t; i < t + m && shared && seen; ++i)
            shared = entries_of(i) == entries_of(longest) || !memcmp(entries_of(i), entries_of(longest), entries_seen(i) * 4);
        for (i64 j = 0; j < seen && shared && m > 1; ++j) shared = inside(entries_of(longest)[j], entry_pool);
        Keys<K> extra{rows + base, pointers + base, copies + base * d, d, 0};
        if (shared && seen) gather_entries(entries_of(longest), seen, extra);

        constexpr i64 together = sizeof(float) / sizeof(K);  // channels that are turned as one
        for (i64 i = 0; i < m * heads; ++i) q_at[i] = q + (t + i / heads) * ldq + i % heads * ldq_head;
        auto score = [&](const Keys<K>& some, i64 from, i64 i, i64 tokens) {
            float* groups = turned + from * d / together;
            turn_rows(reinterpret_cast<const float* const*>(some.rows), some.count, d / together, groups);
            score_rows(q_at + i * heads, tokens * heads, groups, round16(some.count) / PANEL, d,
                       scores + i * heads * most + from, most);
        };
        score(keys, 0, 0, m);
        if (shared) score(extra, base, 0, m);
        for (i64 i = 0; i < m; ++i) {
            if (!shared) {
                extra.count = 0;
                gather_entries(entries_of(t + i), entries_seen(t + i), extra);
                score(extra, base, i, 1);
            }
            const i64 begin = before[shift * i], near = before[shift * i + width] - begin;
            const i64 far = shared && m > 1 ? entries_seen(t + i) : extra.count, count = near + far;
            std::copy(keys.at + begin, keys.at + begin + near, own);
            std::copy(extra.at, extra.at + far, own + near);
            for (i64 h = 0; h < heads; ++h) {
                const float* found = scores + (i * heads + h) * most;
                float* s = shares + h * (most + 16);
                p_at[h] = s;
                auto scaled = [&](const float* from, i64 number, float* to) {  // and some more past the last
                    each(number, [&](i64 j, i64) { store(to + j, load(from + j) * scale); });
                };
                scaled(found + begin, near, s);
                scaled(found + base, far, s + near);
                for (i64 j = 0; j < 16; j += LANES) store(s + count + j, splat(-INFINITY));
                vec tops = splat(sink[h]);
                each(round16(count), [&](i64 j, i64) { tops = max(tops, load(s + j)); });
                float top = greatest(tops);
                total[h] = exp(sink[h] - top) + sum(round16(count), [&](i64 j, i64, vec acc) {
                    vec p = exp(load(s + j) - top);
                    store(s + j, rounded<K>(p));
                    return acc + p;
                });
            }
            for (i64 h = 0; h < heads; h += R) {
                i64 c = 0, these = std::min<i64>(R, heads - h);
                for (; c + V * LANES <= d; c += V * LANES) weigh<R, V>(p_at + h, these, own, count, c, d, result + h * d, d);
                for (; c < d; c += LANES)
                    weigh<R, 1>(p_at + h, these, own, count, c, std::min<i64>(LANES, d - c), result + h * d, d);
            }
            expand_turn(cos_sin, turn_dtype, (t + i) * ldc, r, -1.0f, turn);
            for (i64 h = 0; h < heads; ++h) {
                float* x = result + h * d;
                each(d, [&](i64 c, i64 w) { store(x + c, load(x + c, w) / total[h], w); });
                rope_row(x, d, 1.0f, nullptr, turn, r, out + ((t + i) * heads + h) * d);
            }
        }
    };
    auto shift_to = [=](i64 t) -> i64 {  // from the window of t - 1; -1 if it is another list
        if (window_of(t) == window_of(t - 1)) return 0;
        return memcmp(window_of(t), window_of(t - 1) + 1, (width - 1) * 4) ? -1 : 1;
    };
    parallel((n + block - 1) / block, double(block) * (width + entry_width) * heads * d / 8, [=](i64 begin, i64 end) {
        for (i64 b = begin; b < end; ++b)
            for (i64 t = b * block, stop = std::min(n, t + block), next; t < stop; t = next) {
                next = t + 1;
                i64 shift = next < stop ? shift_to(next) : 0;
                if (shift >= 0)
                    while (next < stop && shift_to(next) == shift) ++next;
                run(t, next - t, std::max<i64>(shift, 0));
            }
    });
}

// ---- mixture of experts ---------------------------------------------------------------------------------------------------

// sqrt(softplus(x . gate)) of each token [n, experts].
float* affinities(FloatRows x, i64 n, i64 d, Matrix<float> gate, i64 experts) {
    SCRATCH(float, scores, n* experts);
    product(x, n, d, gate, experts, scores, experts);
    each(n * experts, [&](i64 i, i64 m) {
        vec v = load(scores + i, m);
        store(scores + i, sqrt(max(v, vec{}) + log1p(exp(-abs(v)))), m);
    });
    return scores;
}

// Weights of the chosen ids from their scores; padding chooses nothing.
INLINE void route_weights(const float* scores, i64 position, i64 k, float scale, i64 experts, i32* ids, float* weights) {
    float total = 0;
    for (i64 j = 0; j < k; ++j) {
        if (position < 0) ids[j] = -1;
        weights[j] = inside(ids[j], experts) ? scores[ids[j]] : 0.0f;
        total += weights[j];
    }
    for (i64 j = 0; j < k; ++j) weights[j] = weights[j] / (total + 1e-20f) * scale;
}

// Rows of an expert: those from `first` on in the order of experts.
struct Segment {
    i64 expert, first, count;
};

// W: float, bf16 or int8 weights; int8 carries scales.
template <class W> void moe(Args a) {
    constexpr bool exact = std::is_same_v<W, int8_t>;
    using H = std::conditional_t<exact, float, W>;
    auto input = a.tensor<const void>();
    auto ids = a.tensor<const i32>();
    auto weights = a.tensor<const float>();
    auto w13 = a.tensor<const W>(), w2 = a.tensor<const W>();
    auto s13 = a.tensor<const float>(), s2 = a.tensor<const float>();
    auto out = a.tensor<float>();
    i64 n = a.size(), k = a.size(), d = a.size(), f = a.size(), experts = a.size(), first = a.size(), ldx = a.size();
    i64 dtype = a.size();
    a.size();  // the weights' dtype
    bool panels = a.size();
    float limit = a.real();
    i64 shared = experts - 1, most = n * (k + 1);
    auto matrix = [=](const W* w, i64 expert, i64 rows, i64 cols) {
        return Matrix<W>{w + expert * rows * cols, panels ? PANEL * cols : cols, panels};
    };

    // Counting sort: routes in order of expert, then token, then slot; the shared expert takes every live token.
    SCRATCH(i64, start, experts + 1);
    SCRATCH(i64, order, most);   // token of each sorted route
    SCRATCH(i64, place, most);   // sorted route of each (token, slot), the shared expert as slot k; -1 for none
    SCRATCH(float, share, most); // routing weight of each sorted route
    std::fill(start, start + experts + 1, 0);
    auto expert_of = [&](i64 t, i64 j) { return inside(ids[t * k + j] - first, shared) ? ids[t * k + j] - first : -1; };
    auto live = [&](i64 t) { return std::any_of(ids + t * k, ids + (t + 1) * k, [](i32 id) { return id >= 0; }); };
    for (i64 t = 0; t < n; ++t) {
        for (i64 j = 0; j < k; ++j)
            if (i64 e = expert_of(t, j); e >= 0) ++start[e + 1];
        start[shared + 1] += live(t);
    }
    for (i64 e = 0; e < experts; ++e) start[e + 1] += start[e];
    i64 routes = start[experts];
    SCRATCH(i64, next, experts);
    std::copy(start, start + experts, next);
    for (i64 t = 0; t < n; ++t)
        for (i64 j = 0; j <= k; ++j) {
            i64 e = j < k ? expert_of(t, j) : live(t) ? shared : -1;
            i64 at = place[t * (k + 1) + j] = e < 0 ? -1 : next[e]++;
            if (at < 0) continue;
            order[at] = t;
            share[at] = j < k ? weights[t * k + j] : 1.0f;
        }

    i64 pieces = 0;
    SCRATCH(Segment, segments, experts + routes / ROWS);
    for (i64 e = 0; e < experts; ++e)
        for (i64 r = start[e]; r < start[e + 1]; r += ROWS) segments[pieces++] = {e, r, std::min(ROWS, start[e + 1] - r)};

    Strided<H> x = float_rows<H>(input, dtype, n, d, ldx);
    SCRATCH(H, hidden, routes* f);
    SCRATCH(float, result, routes* d);
    SCRATCH(const W*, x_at, routes);
    SCRATCH(const W*, h_at, routes);
    SCRATCH(float, x_scale, routes);
    SCRATCH(float, h_scale, routes);
    SCRATCH(i32, x_sum, routes);
    SCRATCH(i32, h_sum, routes);
    SCRATCH(int8_t, x_int8, exact ? n * d : 0);
    SCRATCH(int8_t, x_sorted, exact ? routes * d : 0);
    SCRATCH(int8_t, h_int8, exact ? routes * f : 0);
    SCRATCH(float, token_scale, n);
    SCRATCH(i32, token_sum, n);
    Rows<W> xs, hs;
    if constexpr (exact) {
        parallel(n, double(d) / 4, [=](i64 begin, i64 end) {
            for (i64 t = begin; t < end; ++t) token_scale[t] = quantise_row(x[t], d, x_int8 + t * d, token_sum + t);
        });
        for (i64 p = 0; p < routes; ++p) {
            memcpy(x_sorted + p * d, x_int8 + order[p] * d, d);  // in a row, as the matrix unit wants them
            x_at[p] = x_sorted + p * d;
            x_scale[p] = token_scale[order[p]];
            x_sum[p] = token_sum[order[p]];
            h_at[p] = h_int8 + p * f;
        }
        xs = {x_at, x_scale, x_sum};
        hs = {h_at, h_scale, h_sum};
    } else {
        for (i64 p = 0; p < routes; ++p) x_at[p] = x[order[p]], h_at[p] = hidden + p * f;
        xs = {x_at};
        hs = {h_at};
    }

    const double rows = double(routes) / std::max<i64>(pieces, 1) + 2;
    const i64 up_tasks = (f + COLS - 1) / COLS, down_tasks = (d + COLS - 1) / COLS;  // of a segment
    auto up_projection = [=](i64 begin, i64 end) {
        [[maybe_unused]] TileUse use;
        float gate[ROWS * COLS], up[ROWS * COLS];
        for (i64 task = begin; task < end; ++task) {
            Segment s = segments[task / up_tasks];
            i64 c = task % up_tasks * COLS, cols = std::min(COLS, f - c);
            Matrix<W> w = matrix(w13, s.expert, 2 * f, d);
            dots(xs.from(s.first), s.count, w, c, cols, d, gate, COLS);
            dots(xs.from(s.first), s.count, w, f + c, cols, d, up, COLS);
            const float* scale = exact ? s13 + s.expert * 2 * f + c : nullptr;
            for (i64 r = 0; r < s.count; ++r)
                each(cols, [&](i64 j, i64 m) {
                    vec g = load(gate + r * COLS + j, m), u = load(up + r * COLS + j, m);
                    if constexpr (exact) g *= load(scale + j, m), u *= load(scale + f + j, m);
                    g = min(g, splat(limit));
                    u = max(min(u, splat(limit)), splat(-limit));
                    store(hidden + (s.first + r) * f + c + j, g / (1.0f + exp(-g)) * u, m);
                });
        }
    };
    auto quantise = [=](i64 begin, i64 end) {
        if constexpr (exact)
            for (i64 p = begin; p < end; ++p)
                h_scale[p] = quantise_row(hidden + p * f, f, h_int8 + p * f, h_sum + p) * share[p];
    };
    auto down_projection = [=](i64 begin, i64 end) {
        [[maybe_unused]] TileUse use;
        for (i64 task = begin; task < end; ++task) {
            Segment s = segments[task / down_tasks];
            i64 c = task % down_tasks * COLS, cols = std::min(COLS, d - c);
            float* at = result + s.first * d + c;
            dots(hs.from(s.first), s.count, matrix(w2, s.expert, d, f), c, cols, f, at, d);
            for (i64 r = 0; r < s.count; ++r)
                each(cols, [&](i64 j, i64 m) {
                    vec v = load(at + r * d + j, m);
                    if constexpr (exact)
                        v = round_bf16(v * load(s2 + s.expert * d + c + j, m));
                    else
                        v *= share[s.first + r];
                    store(at + r * d + j, v, m);
                });
        }
    };
    const double up_cost = rows * COLS * d / (exact ? 32 : 8), down_cost = rows * COLS * f / (exact ? 64 : 16);
    if (pieces >= 2 * thread_limit) {  // a thread takes segments through both: one barrier
        parallel(pieces, up_cost * up_tasks + down_cost * down_tasks, [=](i64 begin, i64 end) {
            for (i64 s = begin; s < end; ++s) {
                up_projection(s * up_tasks, (s + 1) * up_tasks);
                quantise(segments[s].first, segments[s].first + segments[s].count);
                down_projection(s * down_tasks, (s + 1) * down_tasks);
            }
        });
    } else {
        parallel(pieces * up_tasks, up_cost, up_projection);
        parallel(routes, double(f) / 4, quantise);
        parallel(pieces * down_tasks, down_cost, down_projection);
    }

    auto combine = [=](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t)
            each(d, [&](i64 i, i64 m) {
                vec total = {};
                for (i64 j = 0; j <= k; ++j)
                    if (i64 p = place[t * (k + 1) + j]; p >= 0) total += load(result + p * d + i, m);
                store(out + t * d + i, exact ? round_bf16(total) : total, m);
            });
    };
    parallel(n, double(k + 1) * d / 8, combine);
}

}  // namespace

// ---- the operators: pointers, then integers, then floats, in the order of `cpu.py` ------------------------------------------

extern "C" {

void dsv4_run(const Call* calls, int64_t n, int threads) {
    thread_limit = threads;
    for (int64_t i = 0; i < n; ++i) calls[i].fn(calls + i);
}

// Sections one after the other: `sections` has for each the calls of a part and the number of parts, `calls` all of them part by
// part. Parts run side by side.
void dsv4_run_sections(const Call* calls, const int64_t* sections, int64_t n, int threads) {
    for (int64_t s = 0; s < n; ++s) {
        i64 count = sections[2 * s], parts = sections[2 * s + 1];
        thread_limit = parts > 1 ? 1 : threads;
        auto some = [=](i64 begin, i64 end) {
            for (i64 i = begin * count; i < end * count; ++i)
                if (calls[i].fn) calls[i].fn(calls + i);
        };
        if (parts > 1 && threads > 1)
            pool->run(threads, parts, 1, [](const void* f, i64 begin, i64 end) {
                (*static_cast<const decltype(some)*>(f))(begin, end);
            }, &some);
        else
            some(0, parts);
        calls += count * parts;
    }
}

void dsv4_embed(const Call* c) {
    Args a(c);
    auto ids = a.tensor<const i32>();
    auto table = a.tensor<const void>();
    auto out = a.tensor<float>();
    i64 n = a.size(), vocab = a.size(), d = a.size(), streams = a.size(), dtype = a.size();
    with_float(dtype, [&](auto* tag) {
        for (i64 t = 0; t < n; ++t) {
            auto from = static_cast<decltype(tag)>(table) + clamp(ids[t], 0, vocab - 1) * d;
            for (i64 s = 0; s < streams; ++s) copy_row(out + (t * streams + s) * d, from, d);
        }
    });
}

void dsv4_take(const Call* c) {
    Args a(c);
    auto table = a.tensor<const char>();
    auto rows = a.tensor<const i32>();
    auto out = a.tensor<char>();
    i64 n = a.size(), size = a.size(), bytes = a.size(), stride = a.size();
    for (i64 t = 0; t < n; ++t) memcpy(out + t * bytes, table + clamp(rows[t], 0, size - 1) * stride, bytes);
}

void dsv4_rms_norm(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>();
    auto gamma = a.tensor<const void>();
    auto out = a.tensor<float>();
    i64 n = a.size(), d = a.size(), ld = a.size(), dtype = a.size(), gamma_dtype = a.size();
    float eps = a.real();
    FloatRows rows = float_rows<float>(x, dtype, n, d, ld);
    const float* weight = float_rows<float, 1>(gamma, gamma_dtype, 1, d, d)[0];
    parallel(n, double(d) / 8, [=](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t) norm_row(rows[t], d, weight, eps, out + t * d);
    });
}

void dsv4_rope(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>(), cos_sin = a.tensor<const void>(), norm = a.tensor<const void>();
    auto out = a.tensor<void>();
    i64 n = a.size(), heads = a.size(), d = a.size(), r = a.size(), ld = a.size(), ld_head = a.size(), ldc = a.size();
    i64 dtype = a.size(), turn_dtype = a.size(), gamma_dtype = a.size(), out_dtype = a.size(), normed = a.size();
    float eps = a.real();
    const float* gamma = norm ? float_rows<float>(norm, gamma_dtype, 1, d, d)[0] : nullptr;
    parallel(n, double(heads) * d / 4, [=](i64 begin, i64 end) {
        SCRATCH(float, row, d);
        SCRATCH(float, turn, 2 * r);
        for (i64 t = begin; t < end; ++t) {
            expand_turn(cos_sin, turn_dtype, t * ldc, r, 1.0f, turn);
            for (i64 h = 0; h < heads; ++h) {
                with_float(dtype, [&](auto* tag) { copy_row(row, static_cast<decltype(tag)>(x) + t * ld + h * ld_head, d); });
                float factor = normed ? norm_factor(sum_squares(row, d), d, eps) : 1.0f;
                with_float(out_dtype, [&](auto* tag) {
                    auto to = static_cast<Elem<decltype(tag)>*>(out) + (t * heads + h) * d;
                    rope_row(row, d, factor, gamma, turn, r, to);
                });
            }
        }
    });
}

void dsv4_linear(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>(), w = a.tensor<const void>();
    auto out = a.tensor<float>();
    i64 n = a.size(), k = a.size(), width = a.size(), ldx = a.size(), ldw = a.size(), panels = a.size();
    i64 dtype = a.size();
    with_float(a.size(), [&](auto* tag) {
        using W = Elem<decltype(tag)>;
        Matrix<W> matrix{static_cast<const W*>(w), ldw, panels != 0};
        product(float_rows<W>(x, dtype, n, k, ldx), n, k, matrix, width, out, width);
    });
}

void dsv4_linear_int8(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>();
    auto w = a.tensor<const int8_t>();
    auto w_scale = a.tensor<const float>();
    auto out = a.tensor<float>();
    i64 n = a.size(), k = a.size(), width = a.size(), ldx = a.size(), ldw = a.size(), panels = a.size();
    i64 groups = a.size();
    Matrix<int8_t> matrix{w, ldw, panels != 0};
    FloatRows from = float_rows<float>(x, a.size(), n, k, ldx);
    i64 part = k / groups;
    SCRATCH(int8_t, q, n* k);
    SCRATCH(float, scale, n* groups);
    SCRATCH(i32, sums, n* groups);
    SCRATCH(const int8_t*, at, n* groups);
    auto fill = [=](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r)
            for (i64 g = 0; g < groups; ++g) {
                at[g * n + r] = q + r * k + g * part;
                scale[g * n + r] = quantise_row(from[r] + g * part, part, q + r * k + g * part, sums + g * n + r);
            }
    };
    parallel(n, double(k) / 4, fill);
    Rows<int8_t> rows{at, scale, sums};
    tasks(n, width, k / 4, [=](i64 r, i64 count, i64 col, i64 cols) {
        float next[ROWS * COLS];
        float* to = out + r * width + col;
        for (i64 g = 0; g < groups; ++g) {
            dots(rows.from(g * n + r), count, matrix.channels(g * part), col, cols, part, g ? next : to, g ? COLS : width);
            for (i64 i = 0; g && i < count; ++i)
                for (i64 j = 0; j < cols; ++j) to[i * width + j] += next[i * COLS + j];
        }
        for (i64 i = 0; i < count; ++i)
            each(cols, [&](i64 j, i64 m) FLAT { store(to + i * width + j, load(to + i * width + j, m) * load(w_scale + col + j, m), m); });
    });
}

void dsv4_grouped_linear(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>(), w = a.tensor<const void>();
    auto out = a.tensor<float>();
    i64 n = a.size(), groups = a.size(), k = a.size(), width = a.size(), ldx = a.size(), ldx_group = a.size();
    i64 panels = a.size(), dtype = a.size();
    with_float(a.size(), [&](auto* tag) {
        using W = Elem<decltype(tag)>;
        for (i64 g = 0; g < groups; ++g) {
            auto from = static_cast<const char*>(x) + g * ldx_group * (dtype == F32 ? 4 : 2);
            Matrix<W> matrix{static_cast<const W*>(w) + g * width * k, panels ? PANEL * k : k, panels != 0};
            product(float_rows<W>(from, dtype, n, k, ldx), n, k, matrix, width, out + g * width, groups * width);
        }
    });
}

void dsv4_hc_pre(const Call* c) {
    Args a(c);
    auto streams = a.tensor<const float>(), fn = a.tensor<const float>(), base = a.tensor<const float>();
    auto scale = a.tensor<const float>();
    auto norm = a.tensor<const void>();
    auto out = a.tensor<float>(), post = a.tensor<float>(), comb = a.tensor<float>();
    i64 n = a.size(), m = a.size(), d = a.size(), iters = a.size(), dtype = a.size(), block = token_block(n);
    float eps = a.real(), hc_eps = a.real();
    const float* gamma = float_rows<float>(norm, dtype, 1, d, d)[0];
    parallel((n + block - 1) / block, double(block) * m * d * (m + 3) * m / 16 + 2000, [=](i64 begin, i64 end) {
        vec mix[(MAX_STREAMS + 2) * MAX_STREAMS];
        for (i64 b = begin; b < end; ++b) {
            i64 t = b * block, count = std::min(block, n - t);
            mix_logits(streams, t, count, m * d, fn, (m + 2) * m, eps, mix);
            for (i64 s = 0; s < m; ++s) {
                mix[s] = sigmoid(mix[s] * scale[0] + base[s]) + hc_eps;
                mix[m + s] = 2.0f * sigmoid(mix[m + s] * scale[1] + base[m + s]);
            }
            for (i64 j = 2 * m; j < (m + 2) * m; ++j) mix[j] = mix[j] * scale[2] + base[j];
            if (m == 4)
                sinkhorn<4>(mix + 8, m, iters, hc_eps);
            else
                sinkhorn<0>(mix + 2 * m, m, iters, hc_eps);
            for (i64 j = 0; j < count; ++j) {
                for (i64 s = 0; s < m; ++s) post[(t + j) * m + s] = mix[m + s][j];
                for (i64 s = 0; s < m * m; ++s) comb[(t + j) * m * m + s] = mix[2 * m + s][j];
                float* row = out + (t + j) * d;
                collapse(streams + (t + j) * m * d, m, d, mix, j, dtype, row);
                norm_row(row, d, gamma, eps, row);
            }
        }
    });
}

void dsv4_hc_head(const Call* c) {
    Args a(c);
    auto streams = a.tensor<const float>(), fn = a.tensor<const float>(), base = a.tensor<const float>();
    auto scale = a.tensor<const float>();
    auto norm = a.tensor<const void>();
    auto out = a.tensor<float>(), normed = a.tensor<float>();
    i64 n = a.size(), m = a.size(), d = a.size(), dtype = a.size(), block = token_block(n);
    float eps = a.real(), hc_eps = a.real();
    const float* gamma = float_rows<float>(norm, dtype, 1, d, d)[0];
    parallel((n + block - 1) / block, double(block) * m * d * (m + 3) / 16, [=](i64 begin, i64 end) {
        vec mix[MAX_STREAMS];
        for (i64 b = begin; b < end; ++b) {
            i64 t = b * block, count = std::min(block, n - t);
            mix_logits(streams, t, count, m * d, fn, m, eps, mix);
            for (i64 s = 0; s < m; ++s) mix[s] = sigmoid(mix[s] * scale[0] + base[s]) + hc_eps;
            for (i64 j = 0; j < count; ++j) {
                collapse(streams + (t + j) * m * d, m, d, mix, j, dtype, out + (t + j) * d);
                norm_row(out + (t + j) * d, d, gamma, eps, normed + (t + j) * d);
            }
        }
    });
}

void dsv4_hc_post(const Call* c) {
    Args a(c);
    auto streams = a.tensor<const float>();
    auto y = a.tensor<const void>();
    auto post = a.tensor<const float>(), comb = a.tensor<const float>();
    auto out = a.tensor<float>();
    i64 n = a.size(), m = a.size(), d = a.size(), ldy = a.size();
    FloatRows rows = float_rows<float>(y, a.size(), n, d, ldy);
    parallel(n, double(d) * m * m / 8, [&](i64 begin, i64 end) {
        with_streams(m, [&](auto count) FLAT {
            for (i64 t = begin; t < end; ++t) {
                float mix[MAX_STREAMS * MAX_STREAMS];
                memcpy(mix, comb + t * m * m, m * m * sizeof(float));
                each(d, [&](i64 i, i64 w) FLAT {
                    vec in[MAX_STREAMS], add = load(rows[t] + i, w);
                    for (i64 s = 0; s < count; ++s) in[s] = load(streams + (t * count + s) * d + i, w);
                    for (i64 o = 0; o < count; ++o) {
                        vec total = add * post[t * count + o];
                        for (i64 s = 0; s < count; ++s) total = fma(splat(mix[s * count + o]), in[s], total);
                        store(out + (t * count + o) * d + i, total, w);
                    }
                });
            }
        });
    });
}

void dsv4_taps(const Call* c) {
    Args a(c);
    i64 n = a.size(), m = a.size(), d = a.size(), count = a.size();
    auto out = a.tensor<float>();
    parallel(n, double(d) * m * count / 16, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t)
            for (i64 k = 0; k < count; ++k) {
                auto streams = static_cast<const float*>(c->ptr[1 + k]) + t * m * d;
                each(d, [&](i64 i, i64 w) {
                    vec total = {};
                    for (i64 s = 0; s < m; ++s) total += load(streams + s * d + i, w);
                    store(out + (t * count + k) * d + i, total / float(m), w);
                });
            }
    });
}

void dsv4_addresses(const Call* c) { addresses(Args(c)); }

void dsv4_draft_addresses(const Call* c) {
    Args a(c);
    auto anchor = a.tensor<const i32>(), position = a.tensor<const i32>(), table = a.tensor<const i32>();
    auto ids = a.tensor<i32>(), positions = a.tensor<i32>(), rows = a.tensor<i32>(), own = a.tensor<i32>();
    i64 n = a.size();
    Ring window{table, a.size(), PAGE_WINDOW};
    i64 steps = a.size(), width = a.size(), noise = a.size();
    for (i64 r = 0; r < n; ++r) {
        for (i64 j = 0; j < steps; ++j) {
            i64 t = r * steps + j;
            ids[t] = j ? i32(noise) : anchor[r];
            positions[t] = i32(position[r] + j);
            own[t] = i32(t);
        }
        window.list(r, position[r] - width, width, rows + r * width);
    }
}

void dsv4_scatter(const Call* c) {
    Args a(c);
    auto pool = a.tensor<char>();
    auto slots = a.tensor<const i32>();
    auto rows = a.tensor<const char>();
    i64 n = a.size(), size = a.size(), k = a.size(), ld = a.size(), to = a.size(), from = a.size(), itemsize = a.size();
    parallel(n, double(k) / 8, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t) {
            if (!inside(slots[t], size)) continue;
            char* at = pool + slots[t] * k * itemsize;
            if (to == from)
                memcpy(at, rows + t * ld * itemsize, k * itemsize);
            else if (to == BF16)
                copy_row(reinterpret_cast<bf16*>(at), reinterpret_cast<const float*>(rows) + t * ld, k);
            else
                copy_row(reinterpret_cast<float*>(at), reinterpret_cast<const bf16*>(rows) + t * ld, k);
        }
    });
}

void dsv4_write_state(const Call* c) {
    Args a(c);
    auto pool = a.tensor<float>();
    auto slots = a.tensor<const i32>();
    auto from = a.tensor<const void>();
    auto ape = a.tensor<const float>();
    auto positions = a.tensor<const i32>();
    i64 n = a.size(), size = a.size(), width = a.size(), ratio = a.size(), ld = a.size();
    FloatRows rows = float_rows<float>(from, a.size(), n, width, ld);
    i64 half = width / 2;
    for (i64 t = 0; t < n; ++t) {
        if (!inside(slots[t], size)) continue;
        const float *row = rows[t], *bias = ape + std::max(positions[t], 0) % ratio * half;
        float* to = pool + slots[t] * width;
        copy_row(to, row, half);
        each(half, [&](i64 i, i64 m) { store(to + half + i, load(row + half + i, m) + load(bias + i, m), m); });
    }
}

void dsv4_compress(const Call* c) {
    with_float(c->i[9], [&](auto* tag) { compress<Elem<decltype(tag)>>(Args(c)); });
}

void dsv4_hadamard_quantise(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>();
    auto values = a.tensor<int8_t>();
    auto scale = a.tensor<float>();
    i64 n = a.size(), heads = a.size(), d = a.size(), ld = a.size(), ld_head = a.size();
    float factor = a.real();
    with_float(a.size(), [&](auto* tag) {
        parallel(n, double(heads) * d, [&](i64 begin, i64 end) {
            SCRATCH(float, row, d);
            for (i64 t = begin; t < end; ++t)
                for (i64 h = 0; h < heads; ++h) {
                    auto from = static_cast<decltype(tag)>(x) + t * ld + h * ld_head;
                    each(d, [&](i64 i, i64 m) { store(row + i, round_bf16(load(from + i, m)), m); });
                    hadamard(row, d);
                    each(d, [&](i64 i, i64 m) { store(row + i, round_bf16(load(row + i, m) * factor), m); });
                    i32 sum;
                    scale[t * heads + h] = quantise_row(row, d, values + (t * heads + h) * d, &sum);
                }
        });
    });
}

void dsv4_index_topk(const Call* c) {
    if (c->i[11] == I8) return index_topk<int8_t>(Args(c));
    with_float(c->i[11], [&](auto* tag) { index_topk<Elem<decltype(tag)>>(Args(c)); });
}

void dsv4_attention(const Call* c) {
    with_float(c->i[16], [&](auto* tag) { attention<Elem<decltype(tag)>>(Args(c)); });
}

void dsv4_route(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>();
    auto gate = a.tensor<const float>(), bias = a.tensor<const float>();
    auto positions = a.tensor<const i32>();
    auto ids = a.tensor<i32>();
    auto weights = a.tensor<float>();
    i64 n = a.size(), d = a.size(), experts = a.size(), k = a.size(), ldx = a.size();
    FloatRows rows = float_rows<float>(x, a.size(), n, d, ldx);
    float scale = a.real();
    const float* scores = affinities(rows, n, d, {gate, a.size(), a.size() != 0}, experts);
    parallel(n, double(k) * experts / 4, [&](i64 begin, i64 end) {
        SCRATCH(float, biased, experts);
        for (i64 t = begin; t < end; ++t) {
            const float* row = scores + t * experts;
            each(experts, [&](i64 i, i64 m) { store(biased + i, load(row + i, m) + load(bias + i, m), m); });
            for (i64 j = 0; j < k; ++j) {
                i64 best = std::max<i64>(best_of(experts, [&](i64 i, i64 m) { return load(biased + i, m); }).index, 0);
                ids[t * k + j] = i32(best);
                biased[best] = -INFINITY;
            }
            route_weights(row, positions[t], k, scale, experts, ids + t * k, weights + t * k);
        }
    });
}

void dsv4_route_hash(const Call* c) {
    Args a(c);
    auto x = a.tensor<const void>();
    auto gate = a.tensor<const float>();
    auto table = a.tensor<const i32>(), tokens = a.tensor<const i32>(), positions = a.tensor<const i32>();
    auto ids = a.tensor<i32>();
    auto weights = a.tensor<float>();
    i64 n = a.size(), d = a.size(), experts = a.size(), k = a.size(), vocab = a.size(), ldx = a.size();
    FloatRows rows = float_rows<float>(x, a.size(), n, d, ldx);
    float scale = a.real();
    const float* scores = affinities(rows, n, d, {gate, a.size(), a.size() != 0}, experts);
    for (i64 t = 0; t < n; ++t) {
        memcpy(ids + t * k, table + clamp(tokens[t], 0, vocab - 1) * k, k * sizeof(i32));
        route_weights(scores + t * experts, positions[t], k, scale, experts, ids + t * k, weights + t * k);
    }
}

void dsv4_moe(const Call* c) {
    with_float(c->i[8], [&](auto* tag) { moe<Elem<decltype(tag)>>(Args(c)); });
}

void dsv4_moe_int8(const Call* c) { moe<int8_t>(Args(c)); }

void dsv4_argmax(const Call* c) {
    Args a(c);
    auto logits = a.tensor<const void>();
    auto out = a.tensor<i32>();
    i64 n = a.size(), vocab = a.size(), ld = a.size();
    with_float(a.size(), [&](auto* tag) {
        parallel(n, double(vocab) / 8, [&](i64 begin, i64 end) {
            for (i64 r = begin; r < end; ++r) {
                auto row = static_cast<decltype(tag)>(logits) + r * ld;
                Best best = best_of(vocab, [&](i64 i, i64 m) { return load(row + i, m); });
                out[r] = i32(std::max<i64>(best.index, 0));
            }
        });
    });
}

void dsv4_markov(const Call* c) {
    Args a(c);
    auto base = a.tensor<const float>();
    auto w1 = a.tensor<const void>(), w2 = a.tensor<const void>();
    auto anchor = a.tensor<const i32>();
    auto out = a.tensor<i32>();
    i64 n = a.size(), steps = a.size(), vocab = a.size(), rank = a.size(), ld = a.size(), ld_step = a.size();
    i64 panels = a.size();
    with_float(a.size(), [&](auto* tag) {
        using W = Elem<decltype(tag)>;
        constexpr i64 CHUNK = 512;
        Matrix<W> matrix{static_cast<const W*>(w2), panels ? PANEL * rank : rank, panels != 0};
        i64 chunks = (vocab + CHUNK - 1) / CHUNK;
        SCRATCH(W, previous, n* rank);
        SCRATCH(Best, best, n* chunks);
        SCRATCH(const W*, at, n);
        Rows<W> rows{at};
        for (i64 s = 0; s < steps; ++s) {
            for (i64 r = 0; r < n; ++r) {
                i64 token = clamp(s ? out[r * steps + s - 1] : anchor[r], 0, vocab - 1);
                copy_row(previous + r * rank, static_cast<const W*>(w1) + token * rank, rank);
                at[r] = previous + r * rank;
            }
            auto search = [=](i64 begin, i64 end) {
                SCRATCH(float, logits, n* CHUNK);
                for (i64 chunk = begin; chunk < end; ++chunk) {
                    i64 from = chunk * CHUNK, count = std::min(CHUNK, vocab - from);
                    dots(rows, n, matrix, from, count, rank, logits, CHUNK);
                    for (i64 r = 0; r < n; ++r) {
                        const float *added = base + r * ld + s * ld_step + from, *own = logits + r * CHUNK;
                        Best& b = best[r * chunks + chunk] =
                            best_of(count, [&](i64 i, i64 m) { return load(added + i, m) + load(own + i, m); });
                        b.index += b.index < 0 ? 0 : from;
                    }
                }
            };
            parallel(chunks, double(n + 2) * CHUNK * rank / 16, search);
            for (i64 r = 0; r < n; ++r) {
                Best b;
                for (i64 chunk = 0; chunk < chunks; ++chunk)
                    if (Best part = best[r * chunks + chunk]; part.index >= 0) b.add(part.value, part.index);
                out[r * steps + s] = i32(std::max<i64>(b.index, 0));
            }
        }
    });
}

void dsv4_begin(const Call* c) {
    Args a(c);
    auto slots = a.tensor<const i32>(), anchor = a.tensor<const i32>(), drafts = a.tensor<const i32>();
    auto position = a.tensor<const i32>(), limit = a.tensor<const i32>();
    auto ids = a.tensor<i32>(), start = a.tensor<i32>(), length = a.tensor<i32>();
    i64 n = a.size(), size = a.size(), ld = a.size(), query_len = a.size();
    for (i64 r = 0; r < n; ++r) {
        i64 slot = clamp(slots[r], 0, size - 1);
        start[r] = position[slot];
        length[r] = i32(clamp(i64(limit[slot]) - 1 - position[slot], 0, query_len));
        ids[r * query_len] = anchor[slot];
        for (i64 j = 1; j < query_len; ++j) ids[r * query_len + j] = drafts[slot * ld + j - 1];
    }
}

void dsv4_accept(const Call* c) {
    Args a(c);
    auto ids = a.tensor<const i32>(), greedy = a.tensor<const i32>(), length = a.tensor<const i32>();
    auto eos = a.tensor<const i32>();
    auto tokens = a.tensor<i32>(), count = a.tensor<i32>(), ended = a.tensor<i32>(), verified = a.tensor<i32>();
    i64 n = a.size(), query_len = a.size(), ld_ids = a.size(), ld_greedy = a.size();
    for (i64 r = 0; r < n; ++r) {
        const i32 *in = ids + r * ld_ids, *got = greedy + r * ld_greedy;
        bool going = true;
        count[r] = ended[r] = 0;
        verified[r] = std::max(length[r] - 1, 0);
        for (i64 j = 0; j < query_len; ++j) {
            if (j) going = going && in[j] == got[j - 1] && got[j - 1] != eos[r];
            bool keep = going && j < length[r];
            tokens[r * query_len + j] = keep ? got[j] : -1;
            count[r] += keep;
            ended[r] |= keep && got[j] == eos[r];
        }
    }
}

void dsv4_commit(const Call* c) {
    Args a(c);
    auto slots = a.tensor<const i32>(), tokens = a.tensor<const i32>(), count = a.tensor<const i32>();
    auto ended = a.tensor<const i32>();
    auto anchor = a.tensor<i32>(), position = a.tensor<i32>(), limit = a.tensor<i32>();
    i64 n = a.size(), size = a.size(), query_len = a.size(), ld = a.size();
    for (i64 r = 0; r < n; ++r) {
        i64 slot = slots[r], emitted = clamp(count[r], 0, query_len);
        if (!inside(slot, size)) continue;
        if (emitted) anchor[slot] = tokens[r * ld + emitted - 1];
        position[slot] += i32(emitted);
        if (ended[r] > 0) limit[slot] = 0;
    }
}
}
