// The calculator of a report: the formulas of dflop/report/worth.py on inputs that the reader may change.
"use strict";
(() => {
  const form = document.getElementById("calculator");
  if (!form) return;
  const HOUR_S = 3600;

  function worth(given) {
    const perStep = given.num_gpus * given.step_s / HOUR_S;
    const gpuHours = perStep * given.num_steps;
    const saved = gpuHours * (given.speedup - 1);
    return {
      gpu_hours: gpuHours,
      blind_gpu_hours: gpuHours * given.speedup,
      saved_gpu_hours: saved,
      saved_low_gpu_hours: gpuHours * (given.speedup_low - 1),
      saved_high_gpu_hours: gpuHours * (given.speedup_high - 1),
      net_gpu_hours: saved - given.once_gpu_hours,
      saved_usd: saved * given.usd_per_gpu_hour,
      net_usd: (saved - given.once_gpu_hours) * given.usd_per_gpu_hour,
      saved_frac: 1 - 1 / given.speedup,
      saved_s: given.num_steps * given.step_s * (given.speedup - 1),
      break_even_steps: breakEven(given.once_gpu_hours, perStep * (given.speedup - 1)),
    };
  }
  function breakEven(once, savedPerStep) {
    if (Number.isNaN(once) || Number.isNaN(savedPerStep)) return NaN;
    if (once === 0) return 0;
    return savedPerStep > 0 ? once / savedPerStep : Infinity;
  }
  function amount(value) {
    if (Number.isNaN(value)) return "-";
    if (!Number.isFinite(value)) return "never";
    const size = Math.abs(value);
    const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 4;
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
  function seconds(value) {
    if (Number.isNaN(value)) return "-";
    if (value < 0) return `-${seconds(-value)}`;
    if (value < 60) return `${amount(value)} s`;
    return value < 172800 ? `${amount(value / HOUR_S)} h` : `${amount(value / HOUR_S / 24)} days`;
  }
  const SHOWN = {
    saved_frac: (value) => (Number.isNaN(value) ? "-" : `${(value * 100).toFixed(1)} %`),
    saved_s: seconds,
  };

  function read() {
    const given = {};
    for (const input of form.querySelectorAll("input")) {
      const least = input.name.startsWith("speedup") ? Number.MIN_VALUE : 0;
      const value = input.valueAsNumber;
      const isRight = value >= least;
      given[input.name] = isRight ? value : NaN;
      input.setAttribute("aria-invalid", String(!isRight && input.value !== ""));
    }
    return given;
  }
  function show() {
    for (const [name, value] of Object.entries(worth(read()))) {
      const output = form.querySelector(`output[name="${name}"]`);
      if (!output) continue;
      output.textContent = (SHOWN[name] || amount)(value);
      output.dataset.value = String(value);
    }
  }
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(show));
  form.querySelector("button[type=reset]").hidden = false;
  show();
})();
