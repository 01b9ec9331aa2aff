"""What a serving engine asks before it loads weights: will decode serve this deployment, on this machine?

    python examples/startup_check.py                  # a deployment that is served
    python examples/startup_check.py --window 512     # one that is not, and why

Needs no GPU and no driver, so it also runs on the node that only schedules.
"""

import argparse
import sys

import sparse_mla

MODEL_HEADS, FAMILY = 64, "dots3_swa"
# Every form of call that the engine will make: one token per sequence, speculative verification, prefill.
NUM_TOKENS = (1, 6, 64, 300)


def main() -> int:
    """Prints what was found; 0 = start."""
    parser = argparse.ArgumentParser(description="Start-up probe of a serving engine.")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--window", type=int, default=576, help="width of the indices buffer")
    parser.add_argument("--page-block-size", type=int, default=64)
    arguments = parser.parse_args()
    # Rounded up: engines pad the heads where the ranks do not divide them, and any count is served as it is.
    num_heads = -(-MODEL_HEADS // arguments.tensor_parallel)

    # The quick question, for code that only knows heads and widths.
    config = sparse_mla.supported_sparse_mla_sm120_configs()[FAMILY]
    fits = config.supports_decode(num_heads, arguments.window, page_block_size=arguments.page_block_size)
    print(f"{FAMILY}: supports_decode({num_heads}, {arguments.window}) is {fits}")

    # The conclusive one. decode asks the same function, so what is accepted here is not refused after the weights
    # are loaded; hence every shape that will occur belongs in the question.
    reasons: set[str] = set()
    for num_tokens in NUM_TOKENS:
        answer = sparse_mla.explain_decode(
            FAMILY,
            num_heads=num_heads,
            topk=arguments.window,
            num_tokens=num_tokens,
            page_block_size=arguments.page_block_size,
        )
        print(f"  {num_tokens} tokens: {answer.kernel or 'refused'}")
        reasons.update(answer.reasons)
    for reason in sorted(reasons):
        print(f"cannot start: {reason}", file=sys.stderr)

    # Ranks that run different builds disagree late and oddly; engines can compare this line across ranks.
    print(f"sparse-mla {sparse_mla.show_config()['version']}")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
