#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/probes.h"
#include "bench/workload.h"
#include "commands.h"
#include "fulgur/version.h"
#include "io/file.h"
#include "progress.h"

namespace fulgur::app {
namespace {

using nlohmann::ordered_json;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Median seconds of a run, after one to warm up, in a tenth of a second or one run.
double burst_seconds(const bench::Workload& workload) {
  workload.run();
  std::vector<double> seconds;
  double sum = 0;
  while (seconds.empty() || (sum < 0.1 && seconds.size() < 1000)) {
    const auto start = std::chrono::steady_clock::now();
    workload.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    sum += seconds.back();
  }
  return median(seconds);
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

/// Runnable threads on the machine, averaged over the last minute.
double load() {
  double average = 0;
  ::getloadavg(&average, 1);
  return average;
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

ordered_json machine(int threads) {
  return {{"cpu", cpu_model()},    {"simd", bench::simd_target()}, {"threads", threads},
          {"compiler", kCompiler}, {"fulgur", FULGUR_VERSION},     {"load_before", load()},
          {"time", utc_now()}};
}

struct Peaks {
  double flops_1 = 0, flops_all = 0, bandwidth = 0;
};

ordered_json result(const bench::Case& c, const bench::Workload& workload, double seconds,
                    const Peaks& peaks) {
  ordered_json row = {{"pass", c.pass},     {"dtype", name_of(c.dtype)},
                      {"batch", c.batch},   {"sq", c.sq},
                      {"sk", c.sk},         {"hq", c.hq},
                      {"hk", c.hk},         {"d", c.d},
                      {"causal", c.causal}, {"threads", c.threads},
                      {"ms", 1e3 * seconds}};
  if (c.pass == "decode") {
    const double rate = workload.bytes() / seconds;
    row["gbytes_per_s"] = rate * 1e-9;
    row["percent_of_read_bandwidth"] = 100 * rate / peaks.bandwidth;
  } else {
    const double rate = workload.flops() / seconds;
    row["gflop_per_s"] = rate * 1e-9;
    row["percent_of_fma_peak"] = 100 * rate / (c.threads == 1 ? peaks.flops_1 : peaks.flops_all);
  }
  return row;
}

/// Cases and probes take turns, so that what disturbs the machine for some seconds touches few of
/// the times of a case; medians over the rounds.
ordered_json measure(const std::vector<bench::Case>& cases, int rounds, int threads, Peaks* peaks) {
  std::deque<bench::Workload> workloads;
  for (const bench::Case& c : cases) workloads.emplace_back(c);
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> flops_1, flops_all, bandwidth;
  {
    Progress progress("bench", rounds * static_cast<int64_t>(cases.size()));
    for (int round = 0; round < rounds; ++round) {
      flops_1.push_back(bench::fma_peak(1));
      flops_all.push_back(bench::fma_peak(threads));
      bandwidth.push_back(bench::read_bandwidth(threads));
      for (size_t i = 0; i < cases.size(); ++i) {
        seconds[i].push_back(burst_seconds(workloads[i]));
        progress.step();
      }
    }
  }
  *peaks = {median(flops_1), median(flops_all), median(bandwidth)};
  ordered_json rows = ordered_json::array();
  for (size_t i = 0; i < cases.size(); ++i) {
    rows.push_back(result(cases[i], workloads[i], median(seconds[i]), *peaks));
  }
  return rows;
}

void print(const bench::Case& c, const ordered_json& row) {
  const bool decode = c.pass == "decode";
  fmt::print("{:<45} {:>10.3f} ms {:>8.1f} {:<7} {:>5.1f}% of {}\n", c.name(),
             row["ms"].get<double>(), row[decode ? "gbytes_per_s" : "gflop_per_s"].get<double>(),
             decode ? "GB/s" : "GFLOP/s",
             row[decode ? "percent_of_read_bandwidth" : "percent_of_fma_peak"].get<double>(),
             decode ? "read bandwidth" : "FMA peak");
}

/// Causal against full and all threads against one, where the grid has both.
void print_ratios(const std::vector<bench::Case>& cases, const ordered_json& rows) {
  const auto compare = [&](const char* what, auto is_base, auto change) {
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!is_base(cases[i])) continue;
      const auto other = std::find_if(cases.begin(), cases.end(), [&](const bench::Case& c) {
        return c.name() == change(cases[i]).name();
      });
      if (other == cases.end()) continue;
      const size_t j = static_cast<size_t>(other - cases.begin());
      fmt::print("{:<45} {:.2f}x as fast {}\n", cases[i].name(),
                 rows[i]["ms"].get<double>() / rows[j]["ms"].get<double>(), what);
    }
  };
  compare(
      "when causal", [](const bench::Case& c) { return !c.causal && c.pass != "decode"; },
      [](bench::Case c) {
        c.causal = true;
        return c;
      });
  const int threads = bench::all_threads();
  if (threads == 1) return;
  compare(
      fmt::format("on {} threads", threads).c_str(),
      [](const bench::Case& c) { return c.threads == 1; },
      [&](bench::Case c) {
        c.threads = threads;
        return c;
      });
}

void run_bench(const std::string& grid, const std::string& json_path) {
  if (!json_path.empty()) io::check_writable(json_path);
  const int threads = bench::all_threads();
  ordered_json report = {{"machine", machine(threads)}};
  const auto& m = report["machine"];
  fmt::print("fulgur {}, {}, {}, {} threads, {}\n", FULGUR_VERSION, m["cpu"].get<std::string>(),
             m["simd"].get<std::string>(), threads, m["compiler"].get<std::string>());
  if (const double before = m["load_before"].get<double>(); before > 0.5) {
    fmt::print("note: other work runs on this machine (load average {:.1f}); expect lower speeds\n",
               before);
  }
  const std::vector<bench::Case> cases = bench::grid(grid, threads);
  Peaks peaks;
  ordered_json rows = measure(cases, grid == "quick" ? 3 : 5, threads, &peaks);
  report["peaks"] = {{"fma_gflop_per_s_1_thread", peaks.flops_1 * 1e-9},
                     {"fma_gflop_per_s_all_threads", peaks.flops_all * 1e-9},
                     {"read_gbytes_per_s_all_threads", peaks.bandwidth * 1e-9}};
  fmt::print(
      "measured: f32 FMA peak {:.1f} GFLOP/s on 1 thread, {:.1f} on {}; memory read {:.1f} "
      "GB/s\n",
      peaks.flops_1 * 1e-9, peaks.flops_all * 1e-9, threads, peaks.bandwidth * 1e-9);
  for (size_t i = 0; i < cases.size(); ++i) print(cases[i], rows[i]);
  print_ratios(cases, rows);
  report["grid"] = grid;
  report["results"] = std::move(rows);
  if (json_path.empty()) return;
  const std::string text = report.dump(1) + "\n";
  const io::Bytes pieces[] = {std::as_bytes(std::span(text))};
  io::OutputFiles files;
  files.add(json_path, pieces);
  files.commit();
}

}  // namespace

void add_bench(CLI::App& app) {
  struct Request {
    std::string grid = "quick", json;
  };
  auto r = std::make_shared<Request>();
  auto* command = app.add_subcommand(
      "bench", "The speed of the CPU engine beside the peaks of this machine, measured in the run");
  command->add_option("--grid", r->grid, "Which shapes; default quick")
      ->check(CLI::IsMember({"quick", "standard"}))
      ->type_name("G");
  command->add_option("--json", r->json, "Write the results to this file too")->type_name("F.json");
  command->footer(
      "Times are medians over rounds in which the shapes take turns. Flops count the matrix "
      "products of the visible scores.\n"
      "Examples:\n"
      "  fulgur bench\n"
      "  OMP_NUM_THREADS=1 fulgur bench --grid standard --json speed.json");
  command->callback([r] { run_bench(r->grid, r->json); });
}

}  // namespace fulgur::app
