// One token of one text through a transformer block, and through the output head. compiled.py compiles this file for
// this processor and calls it. gpt/model/transformer.py is the plain version.
//
// Reading all weights once per token takes most of the time. A compiler turns every loop over them into vector
// instructions. Letters: C d_model, H heads, D head size, S tokens so far, this one included.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FP32, BF16, INT8 };           // types of weights
enum { STORE, ADD, GELU };           // what to do with a product
enum { BLOCK = 512, LARGEST = 32767 };  // the sum of BLOCK products of 8 and 16 bits stays below 2^31
enum { LINE = 64, AHEAD = 4096 };       // bytes of a cache line, and how far ahead to prefetch

typedef struct { const float *gain, *bias; } Norm;
typedef struct { const void *weight; const float *scale, *bias; } Map;  // (out, in); (out,) of integers; (out,) or NULL
typedef struct { Norm norm1, norm2; Map qkv, out_proj, expand, contract; } Block;

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static float dot_fp32(const float *w, const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += w[i] * x[i];
    return sum;
}

static float dot_bf16(const uint16_t *w, const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += from_bf16(w[i]) * x[i];
    return sum;
}

static float dot_int8(const int8_t *w, const int16_t *x, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += (int16_t)w[i] * x[i];
    return sum;
}

// Prefetch memory that will be read soon. A processor does so by itself, but only up to the end of a page.
static void fetch(const char *memory, int bytes) {
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(memory + i);
}

// Round to 16 bits. Return the value of one unit, or NaN if a number is not finite.
static float round_off(const float *x, int16_t *rounded, int n) {
    float max = 1e-30f, zero = 0;
    for (int i = 0; i < n; i++) {
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
        zero += 0 * x[i];
    }
    for (int i = 0; i < n; i++) rounded[i] = (int16_t)lrintf(x[i] / max * LARGEST);
    return max / LARGEST + zero;
}

// The tanh approximation, written with one exponential: Hendrycks and Gimpel 2016.
static float gelu(float x) {
    return x / (1 + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

// A linear map of x (in,) to y (out,). All threads call it together.
static void multiply(int dtype, const Map *map, const float *x, float *y, int out, int in, int action) {
    int16_t rounded[in];
    float unit = dtype == INT8 ? round_off(x, rounded, in) : 1;
    int size = dtype == FP32 ? 4 : dtype == BF16 ? 2 : 1;
#pragma omp for schedule(static)
    for (int row = 0; row < out; row++) {
        float sum = 0;
        for (int i = 0; i < in; i += BLOCK) {
            const char *weight = (const char *)map->weight + ((long)row * in + i) * size;
            int n = in - i < BLOCK ? in - i : BLOCK;
            fetch(weight + AHEAD, n * size);
            sum += dtype == FP32   ? dot_fp32((const float *)weight, x + i, n)
                   : dtype == BF16 ? dot_bf16((const uint16_t *)weight, x + i, n)
                                  : dot_int8((const int8_t *)weight, rounded + i, n);
        }
        if (dtype == INT8) sum *= unit * map->scale[row];
        if (map->bias) sum += map->bias[row];
        y[row] = action == ADD ? y[row] + sum : action == GELU ? gelu(sum) : sum;
    }
}

static void normalize(const Norm *norm, const float *x, float *y, int C) {
    float mean = 0, variance = 0;
    for (int i = 0; i < C; i++) mean += x[i] / C;
    for (int i = 0; i < C; i++) variance += (x[i] - mean) * (x[i] - mean) / C;
    float scale = 1 / sqrtf(variance + 1e-5f);
    for (int i = 0; i < C; i++) y[i] = (x[i] - mean) * scale * norm->gain[i] + norm->bias[i];
}

// One head of attention: its query (D,) over keys and values (S, D), to context (D,).
static void attend(const float *query, const float *keys, const float *values, float *context, int S, int D) {
    float weights[S], max = -1e30f, total = 0;
    for (int s = 0; s < S; s++) {
        weights[s] = dot_fp32(keys + (long)s * D, query, D) / sqrtf(D);
        max = fmaxf(max, weights[s]);
    }
    for (int s = 0; s < S; s++) total += weights[s] = expf(weights[s] - max);
    memset(context, 0, D * sizeof *context);
    for (int s = 0; s < S; s++)
        for (int i = 0; i < D; i++) context[i] += weights[s] / total * values[(long)s * D + i];
}

// x (C,) becomes the block's output. The token is the last of S in the cache of keys and values, each (H, capacity, D).
// `scratch` has room for 8 C numbers.
void transform(const Block *block, int dtype, float *x, float *scratch, float *keys, float *values, int S, int capacity,
               int C, int H) {
    int D = C / H;
    float *qkv = scratch, *context = scratch + 3 * C, *inner = scratch + 4 * C;  // (3, H, D), (H, D) and (4 C,)
#pragma omp parallel
    {
        float normed[C];
        normalize(&block->norm1, x, normed, C);
        multiply(dtype, &block->qkv, normed, qkv, 3 * C, C, STORE);
#pragma omp for schedule(static)
        for (int h = 0; h < H; h++) {
            float *head_keys = keys + (long)h * capacity * D, *head_values = values + (long)h * capacity * D;
            memcpy(head_keys + (long)(S - 1) * D, qkv + C + h * D, D * sizeof *qkv);
            memcpy(head_values + (long)(S - 1) * D, qkv + 2 * C + h * D, D * sizeof *qkv);
            attend(qkv + h * D, head_keys, head_values, context + h * D, S, D);
        }
        multiply(dtype, &block->out_proj, context, x, C, C, ADD);
        normalize(&block->norm2, x, normed, C);
        multiply(dtype, &block->expand, normed, inner, 4 * C, C, GELU);
        multiply(dtype, &block->contract, inner, x, C, 4 * C, ADD);
    }
}

void head(const Map *map, int dtype, const float *x, float *logits, int V, int C) {
#pragma omp parallel
    multiply(dtype, map, x, logits, V, C, STORE);
}
