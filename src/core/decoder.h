// A decoder's forward pass, a layer at a time, over weights that lie wherever their addresses say.
//
// The caller walks the layers: begin, then per layer attend and either dense, or route -> experts (each routed expert once, in
// any grouping; for one token in any order, for a chunk in ascending order) -> combine; at the end finish, and head for each
// piece of the head's rows. Between the calls the caller may read weights from disk; nothing here knows where they come from.
// All work is deterministic to the bit for any threads, chunk and instruction set.
//
// A value that is not finite would vanish in a clamp, in fixed point or in FP16, so the results of every linear layer, norm and
// attention are looked at as they are made, and `take_fault` says where the first one was. Measured on the full-size Maple, one
// thread, CPU time in turns without and with: 0.1 % of a decoded token, nothing of a prompt that noise would show (AVX-512).
#pragma once

#include <cstddef>
#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "kv_cache.h"
#include "threads.h"

namespace spile {

// Rows of a linear layer that a thread takes at a time: 64 kB of codes at 2,048 wide. The first few kB of an item are not
// fetched ahead, so it should not be shorter.
constexpr int kRowsPerItem = 128;
constexpr int kHeadRowsPerItem = 256;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct DecoderConfig {
  int hidden_size, num_layers, num_heads, num_kv_heads, head_dim, num_experts, num_chosen, expert_size, dense_size;
  int rope_dims, vocab_size, window;
  float rms_norm_eps;
  float expert_limit, dense_limit;  // that clamp what a GLU multiplies; 0: none
  bool renormalise;                 // the chosen experts' probabilities are divided by their sum + router_eps
  float router_eps;
  KvBits full_bits, ring_bits;  // of growing and of sliding layers
  int max_chunk;
  int activation_bytes;  // 2, or 3 to force the third byte everywhere
  std::vector<bool> sliding, rotates;  // of each layer: it sees a window alone, RoPE turns its heads
};

struct Linear {
  const uint8_t* codes = nullptr;
  const uint16_t* alpha = nullptr;
};

struct LayerWeights {
  const uint16_t *input_norm = nullptr, *post_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr, *router = nullptr;
  Linear q, k, v, o, gate, up, down;  // the last three: a dense layer's
  const uint16_t *gate_alpha = nullptr, *up_alpha = nullptr, *down_alpha = nullptr;  // experts': [E, rows]
};

struct Pair {  // one routed expert of one token
  int token;
  int rank;  // its place among the token's experts in ascending id
};

// Where a value that is not finite was met first: the order of a token.
enum class Stage { kNone, kEmbedding, kAttention, kRouter, kExperts, kDense, kHead };

constexpr uint64_t kNoFault = ~uint64_t{0};

struct Fault {
  Stage stage;
  int layer, item;  // `item`: the token of the chunk (embedding) or the expert, the lowest of those that met one at once
};

class Decoder {
 public:
  Decoder(const DecoderConfig& config, const Kernels* kernels, int num_threads);

  std::vector<LayerWeights> layers;
  const uint16_t* final_norm = nullptr;

  const DecoderConfig& config() const { return config_; }
  ThreadPool& threads() { return pool_; }
  CacheShape cache_shape() const;

  // h = the embedding rows `rows[0 .. T)` of a 4-bit table; `rope` [T, rope_dims] holds the cosines and then the sines by which
  // each token's heads are turned.
  void begin(const Affine4& table, const int64_t* rows, int T, const float* rope);
  // Attention of the chunk's tokens at positions cache.position + t; their keys and values are stored. h is updated.
  void attend(KvCache& cache, int layer);
  void dense(int layer);
  // Chooses experts; returns the distinct ids, ascending. counts()[i] tokens want the i-th of them. With `allowed` [E], only
  // experts whose entry is not zero are chosen from.
  const std::vector<int32_t>& route(int layer, const uint8_t* allowed = nullptr);
  const std::vector<int32_t>& counts() const { return counts_; }
  // What a later layer's router would choose of what is known now, the likeliest first: a guess, which changes nothing. For one
  // token, between route and combine. Fills ids [num_chosen].
  void foretell(int layer, int32_t* ids);
  // Computes `num` routed experts, whose packed codes lie at codes[3 * i + {0, 1, 2}] (gate, up, down). Throws
  // std::invalid_argument when a chunk's experts do not come in ascending order.
  void experts(int layer, const int32_t* ids, const uint64_t* codes, int num);
  void combine();
  // Makes `num` tokens of the chunk ready for the head, which `after` others follow.
  void finish(int num, int after = 0);
  // Logits of those tokens for vocabulary rows [row, row + count), whose weights `piece` starts with; out is [num, V].
  void head(const Affine4& piece, int row, int count, float* out);

  // The first value that was not finite since `begin` or the last call, whatever was computed after it.
  Fault take_fault();

 private:
  struct Task {
    int expert;
    const uint8_t* codes[3];
    int first, count;  // its pairs, in pairs_ and in the scratch of this batch
  };
  void normalise_and_fix(const uint16_t* weight, Stage stage, int layer);
  void fix_token(int t);
  // Takes note of a fault unless `is_fine`. From any thread.
  void check(bool is_fine, Stage stage, int layer, int item = 0) {
    if (!is_fine) note(stage, layer, item);
  }
  void note(Stage stage, int layer, int item);
  // The same of [row, end) of each of T results.
  void check_rows(float* const* y, int T, size_t row, size_t end, Stage stage, int layer, int item = 0);
  void expert_batch(int layer, const Task* tasks, int num);
  void add_outputs(const Task* tasks, int num);
  void rotate(float* head, int t) const;
  void attend_one(const KvCache& cache, int layer);
  void attend_many(const KvCache& cache, int layer);
  void attend_tokens(const KvCache& cache, int layer, int kv_head, int first_token, int num, float* scratch);
  int64_t first_seen(int layer, int64_t position) const;
  Seen seen_of(int layer, int64_t block, int64_t position) const;
  Queries pack_queries(const KvLayout& layout, int kv_head, int first_token, int num, float* to) const;

  DecoderConfig config_;
  const Kernels* kernels_;
  ThreadPool pool_;
  int T_ = 0;
  int heads_per_kv_, q_size_, kv_size_, value_stride_;
  int most_tokens_;  // that share a walk over the cache
  size_t packed_;   // floats of one query row, packed

  Buffer<float> h_, x_, q_, k_, v_, attended_, probabilities_, foretold_, outputs_, gate_, up_, rope_;
  Buffer<int8_t> planes_, attended_planes_, pair_planes_, dense_planes_;
  std::vector<int32_t> groups_;
  std::vector<Fixed> fixed_, attended_fixed_, pair_fixed_;
  Buffer<float> partials_;
  std::vector<Buffer<float>> attend_scratch_;  // a thread
  std::vector<int32_t> chosen_;   // [T, K] ascending
  std::vector<float> weights_;    // [T, K]
  std::vector<int32_t> ids_, counts_, first_pair_;
  std::vector<Pair> pairs_;       // grouped by expert, ascending
  int max_pairs_;
  std::atomic<uint64_t> fault_{kNoFault};  // layer, stage, item: the least is the first of a token
  int num_finished_ = 0;
  int last_expert_ = -1;
};

}  // namespace spile
