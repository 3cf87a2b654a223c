"""examples/sft_budget.py in float64, where two layouts differ by rounding of 1e-15, not of 1e-6."""

from __future__ import annotations

from tests.programs.launch import ROOT

CHANGES = {
    ".logits\n": ".logits.double()\n",
    ".float().log_softmax": ".log_softmax",
    "LlamaForCausalLM(config)": "LlamaForCausalLM(config).double()",
}

if __name__ == "__main__":
    text = (ROOT / "examples" / "sft_budget.py").read_text()
    for before, after in CHANGES.items():
        assert before in text, before
        text = text.replace(before, after)
    exec(compile(text, "sft_budget_double.py", "exec"))
