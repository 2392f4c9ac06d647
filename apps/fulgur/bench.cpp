#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/probes.h"
#include "bench/workload.h"
#include "commands.h"
#include "fulgur/version.h"
#include "io/file.h"

namespace fulgur::app {
namespace {

using nlohmann::ordered_json;

/// Median seconds of a run: at least five runs and half a second, after one to warm up.
double median_seconds(const bench::Workload& workload) {
  workload.run();
  std::vector<double> seconds;
  double sum = 0;
  while (seconds.size() < 5 || (sum < 0.5 && seconds.size() < 1000)) {
    const auto start = std::chrono::steady_clock::now();
    workload.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    sum += seconds.back();
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
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
  double flops_1, flops_all, bandwidth;
};

ordered_json measure(const bench::Case& c, const Peaks& peaks) {
  const bench::Workload workload(c);
  const double seconds = median_seconds(workload);
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

void print(const bench::Case& c, const ordered_json& row) {
  const bool decode = c.pass == "decode";
  fmt::print("{:<45} {:>10.3f} ms {:>8.1f} {:<7} {:>5.1f}% of {}\n", c.name(),
             row["ms"].get<double>(), row[decode ? "gbytes_per_s" : "gflop_per_s"].get<double>(),
             decode ? "GB/s" : "GFLOP/s",
             row[decode ? "percent_of_read_bandwidth" : "percent_of_fma_peak"].get<double>(),
             decode ? "read bandwidth" : "FMA peak");
  std::fflush(stdout);
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
  const Peaks peaks{bench::fma_peak(1), bench::fma_peak(threads), bench::read_bandwidth(threads)};
  report["peaks"] = {{"fma_gflop_per_s_1_thread", peaks.flops_1 * 1e-9},
                     {"fma_gflop_per_s_all_threads", peaks.flops_all * 1e-9},
                     {"read_gbytes_per_s_all_threads", peaks.bandwidth * 1e-9}};
  fmt::print(
      "measured: f32 FMA peak {:.1f} GFLOP/s on 1 thread, {:.1f} on {}; memory read {:.1f} "
      "GB/s\n",
      peaks.flops_1 * 1e-9, peaks.flops_all * 1e-9, threads, peaks.bandwidth * 1e-9);
  const std::vector<bench::Case> cases = bench::grid(grid, threads);
  ordered_json rows = ordered_json::array();
  for (const bench::Case& c : cases) {
    rows.push_back(measure(c, peaks));
    print(c, rows.back());
  }
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
      "Times are medians. Flops count the matrix products of the visible scores.\n"
      "Examples:\n"
      "  fulgur bench\n"
      "  OMP_NUM_THREADS=1 fulgur bench --grid standard --json speed.json");
  command->callback([r] { run_bench(r->grid, r->json); });
}

}  // namespace fulgur::app
