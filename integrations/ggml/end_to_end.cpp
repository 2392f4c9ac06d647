// A small model of random weights, run by llama.cpp with ggml's attention and then with that of
// ggml-fulgur: both give the same logits. end_to_end FOLDER MODULE [THREADS]; the model is written
// to FOLDER.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace {

// Heads of 64 columns, four of Q to each of K.
constexpr int kColumns = 1024, kHeads = 16, kKvHeads = 4, kLayers = 2, kHidden = 2048;
constexpr int kVocabulary = 4096, kPrompt = 2048, kSteps = 16;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

void write_model(const std::string& path) {
  gguf_context* const file = gguf_init_empty();
  gguf_set_val_str(file, "general.architecture", "llama");
  gguf_set_val_u32(file, "llama.context_length", 4 * kPrompt);
  gguf_set_val_u32(file, "llama.embedding_length", kColumns);
  gguf_set_val_u32(file, "llama.block_count", kLayers);
  gguf_set_val_u32(file, "llama.feed_forward_length", kHidden);
  gguf_set_val_u32(file, "llama.attention.head_count", kHeads);
  gguf_set_val_u32(file, "llama.attention.head_count_kv", kKvHeads);
  gguf_set_val_u32(file, "llama.rope.dimension_count", kColumns / kHeads);
  gguf_set_val_u32(file, "llama.vocab_size", kVocabulary);
  gguf_set_val_f32(file, "llama.attention.layer_norm_rms_epsilon", 1e-5F);
  gguf_set_val_str(file, "tokenizer.ggml.model", "no_vocab");

  ggml_context* const memory = ggml_init({size_t{256} << 20, nullptr, false});
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, int columns, int rows, float deviation) {
    ggml_tensor* const t = rows == 1 ? ggml_new_tensor_1d(memory, GGML_TYPE_F32, columns)
                                     : ggml_new_tensor_2d(memory, GGML_TYPE_F32, columns, rows);
    ggml_set_name(t, name.c_str());
    std::normal_distribution<float> normal(0, deviation);
    auto* const numbers = static_cast<float*>(t->data);
    std::generate_n(numbers, ggml_nelements(t),
                    [&] { return deviation == 0 ? 1 : normal(random); });
    gguf_add_tensor(file, t);
  };
  const auto add_matrix = [&](const std::string& name, int columns, int rows, float gain = 1) {
    add(name, columns, rows, gain / std::sqrt(static_cast<float>(columns)));
  };
  const int kv_columns = kColumns / kHeads * kKvHeads;
  add("token_embd.weight", kColumns, kVocabulary, 1);
  add("output_norm.weight", kColumns, 1, 0);
  add_matrix("output.weight", kColumns, kVocabulary);
  for (int i = 0; i < kLayers; ++i) {
    const std::string layer = "blk." + std::to_string(i) + ".";
    add(layer + "attn_norm.weight", kColumns, 1, 0);
    // Scores that differ by more than 1, so that it matters which keys are seen.
    add_matrix(layer + "attn_q.weight", kColumns, kColumns, 2);
    add_matrix(layer + "attn_k.weight", kColumns, kv_columns);
    add_matrix(layer + "attn_v.weight", kColumns, kv_columns);
    add_matrix(layer + "attn_output.weight", kColumns, kColumns, 8);
    add(layer + "ffn_norm.weight", kColumns, 1, 0);
    add_matrix(layer + "ffn_gate.weight", kColumns, kHidden);
    add_matrix(layer + "ffn_up.weight", kColumns, kHidden);
    add_matrix(layer + "ffn_down.weight", kHidden, kColumns);
  }
  if (!gguf_write_to_file(file, path.c_str(), false)) fail("cannot write " + path);
  gguf_free(file);
  ggml_free(memory);
}

struct Run {
  int sequences;
  ggml_type cache;
  int threads;
};

struct Result {
  std::vector<float> logits;  // of the last token of the prompts and of all steps
  double prompt_seconds, step_seconds;
};

/// Prompts, and then steps of one token a sequence, all of them drawn at random.
Result run(llama_model* model, const Run& run) {
  llama_context_params parameters = llama_context_default_params();
  const int prompt = kPrompt / run.sequences;
  parameters.n_ctx = run.sequences * (prompt + 256);
  parameters.n_seq_max = run.sequences;
  parameters.n_batch = kPrompt;
  parameters.type_k = parameters.type_v = run.cache;
  parameters.n_threads = parameters.n_threads_batch = run.threads;
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  llama_context* const context = llama_init_from_model(model, parameters);
  if (context == nullptr) fail("llama.cpp makes no context");
  llama_batch batch = llama_batch_init(kPrompt, 0, 1);
  std::mt19937 random(2);
  const auto add = [&](int sequence, int position, bool wanted) {
    const int i = batch.n_tokens++;
    batch.token[i] = static_cast<llama_token>(random() % kVocabulary);
    batch.pos[i] = position;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequence;
    batch.logits[i] = static_cast<int8_t>(wanted);
  };
  Result result{};
  const auto decode = [&] {
    const auto begin = std::chrono::steady_clock::now();
    if (llama_decode(context, batch) != 0) fail("llama_decode fails");
    for (int i = 0; i < batch.n_tokens; ++i) {
      if (batch.logits[i] == 0) continue;
      const float* const logits = llama_get_logits_ith(context, i);
      result.logits.insert(result.logits.end(), logits, logits + kVocabulary);
    }
    batch.n_tokens = 0;
    const auto end = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(end - begin).count();
  };
  for (int s = 0; s < run.sequences; ++s) {
    for (int i = 0; i < prompt; ++i) add(s, i, i + 1 == prompt);
  }
  result.prompt_seconds = decode();
  for (int step = 0; step < kSteps; ++step) {
    for (int s = 0; s < run.sequences; ++s) add(s, prompt + step, true);
    result.step_seconds += decode();
  }
  llama_batch_free(batch);
  llama_free(context);
  return result;
}

/// Squares of the differences by squares of the logits, and rows with another largest logit that
/// differences do not explain.
struct Difference {
  double nmse = 0;
  int other_tokens = 0;

  Difference(const std::vector<float>& want, const std::vector<float>& got) {
    if (want.size() != got.size()) fail("the number of logits differs");
    double squares = 0, most = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = got[i] - want[i];
      nmse += difference * difference;
      squares += static_cast<double>(want[i]) * want[i];
      most = std::max(most, std::fabs(difference));
    }
    nmse /= squares;
    for (size_t row = 0; row < want.size(); row += kVocabulary) {
      const auto token = [&](const std::vector<float>& of) {
        const auto begin = of.begin() + static_cast<ptrdiff_t>(row);
        return std::max_element(begin, begin + kVocabulary) - begin;
      };
      const ptrdiff_t a = token(want), b = token(got);
      other_tokens += a != b && want[row + a] - want[row + b] > 2 * most;
    }
  }
};

int run_all(const std::string& folder, const char* module, int threads) {
  const std::string path = folder + "/random.gguf";
  write_model(path);
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  unsetenv("GGML_BACKEND_PATH");  // it is loaded below
  ggml_backend_load_all();
  llama_model* const model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
  if (model == nullptr) fail("llama.cpp does not load " + path);
  std::vector<Run> runs;
  for (const ggml_type cache : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    for (const int sequences : {1, 8}) runs.push_back({sequences, cache, threads});
  }
  std::vector<Result> by_ggml;
  for (const Run& one : runs) by_ggml.push_back(run(model, one));
  if (ggml_backend_load(module) == nullptr) fail(std::string("ggml does not load ") + module);
  int failed = 0;
  std::printf(
      "cache sequences | prompt, tokens/s: ggml fulgur | steps: ggml fulgur | NMSE of logits\n");
  for (size_t i = 0; i < runs.size(); ++i) {
    const Result by_fulgur = run(model, runs[i]);
    const Difference difference(by_ggml[i].logits, by_fulgur.logits);
    // Equal bits would mean that ggml computed both.
    const bool ok = difference.nmse > 0 && difference.nmse < 1e-3 && difference.other_tokens == 0;
    failed += ok ? 0 : 1;
    const double steps = kSteps * runs[i].sequences;
    std::printf("%5s %9d | %.0f %.0f | %.0f %.0f | %.1e %s\n", ggml_type_name(runs[i].cache),
                runs[i].sequences, kPrompt / by_ggml[i].prompt_seconds,
                kPrompt / by_fulgur.prompt_seconds, steps / by_ggml[i].step_seconds,
                steps / by_fulgur.step_seconds, difference.nmse, ok ? "ok" : "FAILED");
  }
  llama_model_free(model);
  std::remove(path.c_str());
  return failed;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3 || argc > 4) fail("usage: end_to_end FOLDER MODULE [THREADS]");
  return run_all(argv[1], argv[2], argc > 3 ? std::atoi(argv[3]) : 2) == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "end_to_end: %s\n", error.what());
  return 2;
}
