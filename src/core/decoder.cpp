#include "decoder.h"

#include <algorithm>
#include <cfloat>

namespace spile {
namespace {

// Query rows that walk over the cache together: 32 rows of 128 dimensions, their scores and results stay in the second cache.
constexpr int kQueryRows = 32;

}  // namespace

Decoder::Decoder(const DecoderConfig& config, const Kernels* kernels, int num_threads)
    : layers(static_cast<size_t>(config.num_layers)), config_(config), kernels_(kernels), pool_(num_threads) {
  const auto& c = config_;
  const size_t T = static_cast<size_t>(c.max_chunk), D = static_cast<size_t>(c.hidden_size);
  heads_per_kv_ = c.num_heads / c.num_kv_heads;
  q_size_ = c.num_heads * c.head_dim;
  kv_size_ = c.num_kv_heads * c.head_dim;
  value_stride_ = (c.head_dim + 15) / 16 * 16;
  max_pairs_ = std::max(c.max_chunk, 4 * c.num_chosen);
  const size_t pairs = static_cast<size_t>(max_pairs_), wide = static_cast<size_t>(std::max(c.expert_size, 16));
  h_.resize(T * D);
  x_.resize(T * D);
  q_.resize(T * static_cast<size_t>(q_size_));
  k_.resize(T * static_cast<size_t>(kv_size_));
  v_.resize(T * static_cast<size_t>(kv_size_));
  attended_.resize(T * static_cast<size_t>(q_size_));
  probabilities_.resize(T * static_cast<size_t>(c.num_experts));
  outputs_.resize(static_cast<size_t>(max_pairs_) * D);
  gate_.resize(pairs * wide);
  up_.resize(pairs * wide);
  rope_.resize(T * static_cast<size_t>(c.rope_dims));
  planes_.resize(T * 3 * plane_nbytes(D));
  attended_planes_.resize(T * 3 * plane_nbytes(static_cast<size_t>(q_size_)));
  pair_planes_.resize(pairs * 3 * plane_nbytes(wide));
  groups_.resize(T * num_group_sums(D));
  fixed_.resize(T);
  attended_fixed_.resize(T);
  pair_fixed_.resize(pairs);
  most_tokens_ = std::max(1, kQueryRows / heads_per_kv_);
  packed_ = static_cast<size_t>(c.head_dim + c.head_dim / 16);
  const size_t rows = static_cast<size_t>(most_tokens_ * heads_per_kv_), result = static_cast<size_t>(2 + value_stride_);
  attend_scratch_.resize(static_cast<size_t>(pool_.size()));
  for (auto& scratch : attend_scratch_) scratch.resize(rows * (packed_ + 2 * result));
  chosen_.resize(T * static_cast<size_t>(c.num_chosen));
  weights_.resize(T * static_cast<size_t>(c.num_chosen));
  pairs_.resize(T * static_cast<size_t>(c.num_chosen));
  first_pair_.resize(static_cast<size_t>(c.num_experts) + 1);
}

CacheShape Decoder::cache_shape() const {
  const KvLayout full = {config_.head_dim, config_.full_bits}, ring = {config_.head_dim, config_.ring_bits};
  return {config_.num_kv_heads, full, ring, config_.window, config_.max_chunk, config_.sliding};
}

void Decoder::note(Stage stage, int layer, int item) {
  const uint64_t fault = static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(stage) << 28 | static_cast<uint64_t>(item);
  uint64_t before = fault_.load();
  while (fault < before && !fault_.compare_exchange_weak(before, fault)) {
  }
}

Fault Decoder::take_fault() {
  const uint64_t fault = fault_.exchange(kNoFault);
  if (fault == kNoFault) return {Stage::kNone, 0, 0};
  return {static_cast<Stage>(fault >> 28 & 15), static_cast<int>(fault >> 32), static_cast<int>(fault & 0xFFFFFFF)};
}

void Decoder::check_rows(float* const* y, int T, size_t row, size_t end, Stage stage, int layer, int item) {
  for (int t = 0; t < T; ++t) check(kernels_->largest(y[t] + row, end - row) <= FLT_MAX, stage, layer, item);
}

void Decoder::begin(const Affine4& table, const int64_t* rows, int T, const float* rope) {
  T_ = T;
  std::copy(rope, rope + static_cast<size_t>(T) * static_cast<size_t>(config_.rope_dims), rope_.begin());
  fault_ = kNoFault;
  const size_t D = static_cast<size_t>(config_.hidden_size);
  pool_.run(T, [&](int t, int) {
    float* h = h_.data() + static_cast<size_t>(t) * D;
    kernels_->affine4_row(table, static_cast<size_t>(rows[t]), h);
    check(kernels_->largest(h, D) <= FLT_MAX, Stage::kEmbedding, 0, t);
  });
}

void Decoder::fix_token(int t) {
  const size_t D = static_cast<size_t>(config_.hidden_size), i = static_cast<size_t>(t);
  fixed_[i] = kernels_->fix(x_.data() + i * D, D, config_.activation_bytes, Layout::kTernary,
                            planes_.data() + i * 3 * plane_nbytes(D), nullptr);
}

void Decoder::normalise_and_fix(const uint16_t* weight, Stage stage, int layer) {
  const size_t D = static_cast<size_t>(config_.hidden_size);
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t) * D;
    check(kernels_->rmsnorm(h_.data() + at, weight, D, config_.rms_norm_eps, x_.data() + at), stage, layer);
    fix_token(t);
    check(fixed_[static_cast<size_t>(t)].is_finite(), stage, layer);
  });
}

void Decoder::dense(int layer) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size), wide = static_cast<size_t>(c.dense_size), T = static_cast<size_t>(T_);
  const size_t stride = 3 * plane_nbytes(wide);
  if (gate_.size() < T * wide) gate_.resize(T * wide);
  if (up_.size() < T * wide) up_.resize(T * wide);
  if (dense_planes_.size() < T * stride) dense_planes_.resize(T * stride);
  normalise_and_fix(w.post_norm, Stage::kDense, layer);
  std::vector<const Fixed*> x(T);
  std::vector<float*> gate(T), up(T), y(T);
  for (size_t t = 0; t < T; ++t) {
    x[t] = &fixed_[t];
    gate[t] = gate_.data() + t * wide;
    up[t] = up_.data() + t * wide;
    y[t] = x_.data() + t * D;
  }
  const int items = ceil_div(c.dense_size, kRowsPerItem);
  pool_.run(2 * items, [&](int item, int) {
    const bool is_gate = item < items;
    const Linear& linear = is_gate ? w.gate : w.up;
    const size_t row = static_cast<size_t>((is_gate ? item : item - items) * kRowsPerItem);
    kernels_->ternary({linear.codes, linear.alpha, D}, row, std::min(wide, row + kRowsPerItem), x.data(), T_,
                      is_gate ? gate.data() : up.data());
  });
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t);
    kernels_->swiglu(gate[at], up[at], wide, c.dense_limit, gate[at]);
    attended_fixed_[at] = kernels_->fix(gate[at], wide, c.activation_bytes, Layout::kTernary,
                                        dense_planes_.data() + at * stride, nullptr);
    check(attended_fixed_[at].is_finite(), Stage::kDense, layer);  // without clamps nothing hid before
  });
  for (size_t t = 0; t < T; ++t) x[t] = &attended_fixed_[t];
  pool_.run(ceil_div(c.hidden_size, kRowsPerItem), [&](int item, int) {
    const size_t row = static_cast<size_t>(item * kRowsPerItem), end = std::min(D, row + kRowsPerItem);
    kernels_->ternary({w.down.codes, w.down.alpha, wide}, row, end, x.data(), T_, y.data());
    check_rows(y.data(), T_, row, end, Stage::kDense, layer);
    for (size_t t = 0; t < T; ++t)
      for (size_t i = row; i < end; ++i) h_[t * D + i] = h_[t * D + i] + y[t][i];
  });
}

void Decoder::finish(int num, int after) {
  const size_t D = static_cast<size_t>(config_.hidden_size);
  num_finished_ = num;
  pool_.run(num, [&](int i, int) {
    const size_t at = static_cast<size_t>(i), t = static_cast<size_t>(T_ - after - num + i);
    check(kernels_->rmsnorm(h_.data() + t * D, final_norm, D, config_.rms_norm_eps, x_.data() + t * D), Stage::kHead,
          config_.num_layers);
    fixed_[at] = kernels_->fix(x_.data() + t * D, D, config_.activation_bytes, Layout::kNibble,
                               planes_.data() + at * 3 * plane_nbytes(D), groups_.data() + at * num_group_sums(D));
    check(fixed_[at].is_finite(), Stage::kHead, config_.num_layers);
  });
}

void Decoder::head(const Affine4& piece, int row, int count, float* out) {
  const size_t V = static_cast<size_t>(config_.vocab_size);
  std::vector<const Fixed*> x(static_cast<size_t>(num_finished_));
  std::vector<float*> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = &fixed_[i];
    y[i] = out + i * V + row;
  }
  pool_.run(ceil_div(count, kHeadRowsPerItem), [&](int item, int) {
    const size_t first = static_cast<size_t>(item * kHeadRowsPerItem);
    const size_t end = std::min(static_cast<size_t>(count), first + kHeadRowsPerItem);
    kernels_->affine4(piece, first, end, x.data(), num_finished_, y.data());
    check_rows(y.data(), num_finished_, first, end, Stage::kHead, config_.num_layers);
  });
}

}  // namespace spile
