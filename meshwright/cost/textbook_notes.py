"""What to mind about a closed form: where a literal reading of the literature or of the notes goes wrong."""

NOTES = "notes"  # five study notes, 000 to 004, that this project began with; docs/textbook.md says what each holds
MEGATRON = "Narayanan et al. 2021 (Megatron-LM)"
KORTHIKANTI = "Korthikanti et al. 2022"
ZERO = "Rajbhandari et al. 2020 (ZeRO)"
PALM = "Chowdhery et al. 2022 (PaLM), appendix B"

NOTICES: dict[str, str] = {
    "gpt-parameters": "For a GPT with biases, learned positions and a tied output. The notes' first GPT has 147 "
    "million only with an untied output projection; tied it has 116.6 million.",
    "notes-parameters": "All three counts of the notes fit it. They print 4,769,521,664 beside embed-dim 2048, and the "
    "number belongs to 4096; 2048 gives 1,243,910,144.",
    "states-exact": "16 bytes with narrow gradients. Schemes differ: the notes count 8 (all bf16), 16 and 20.",
    "states-megatron": "Gradients are summed in fp32, so 18.",
    "states-notes": "Counts the fp32 master copy twice: once as (2 + 4) of the model, once inside Adam's 12. Exact is "
    "16, or 18 with fp32 gradients. For the notes' GPT it hides behind activations: 25.29 GB, against 24.70 and 24.99. "
    "That mixed precision takes more memory is true of these states alone: activations halve.",
    "states-bf16": "Weights, gradients and moments all narrow: 10 billion parameters fill 80 GB with nothing else. "
    "Updates smaller than a part in 256 of a weight are lost.",
    "zero-1": "4 × less is the limit for many ranks: 64 ranks save 3.8 ×.",
    "zero-2": "8 × less is the limit for many ranks: 64 ranks save 7.2 ×.",
    "zero-3": "Weights are all-gathered where the notes say broadcast. Hybrid sharding, inside a node only, is MiCS; "
    "the notes call it ZeRO++, whose secondary shards are torch's reshard_after_forward = a number of ranks.",
    "activations": "The notes' text leaves out the 10, and their worked number needs it: 349,175,808 bytes a sample, "
    "301,989,888 without. Without flash attention; GELU, dropout and 4·h are assumed.",
    "activations-flash": "Without the scores, which flash attention never stores.",
    "activations-selective": "Attention is computed anew from its inputs, with sequence parallelism.",
    "activations-full": "Only the input of each layer; while one layer is walked back it is whole for a moment.",
    "feed-forward": "The notes take 4·h for Llama 3 405B and find 63.0 GiB; its real width, 53,248, gives 51.2 GiB.",
    "notes-memory": "What the notes call samples a second there (482,427 on one GPU) must be tokens, and 2.198 × on "
    "two GPUs is more than two can give: the figure for one GPU was taken too early.",
    "notes-total": "With states that count the master copy twice; the factor 1.2 is a margin, not a measurement.",
    "sqrt-recompute": "At its best 2·√L instead of L.",
    "recompute-once": "A segment is kept while it is walked back: one extra forward.",
    "recompute-each": "Nothing is kept inside a segment, so every layer starts again from the segment's input. Two "
    "assumptions, two costs: no contradiction in the notes.",
    "bubble": "Interleaving divides it by the stages of a rank, and sends as many times more messages.",
    "bubble-over-ideal": "Papers print this or the share of the whole step; they differ by a factor of 1 + itself.",
    "batch": "With accumulation the backward runs for every microbatch and the optimizer once; the notes say that the "
    "backward is calculated at the last one. Skipping the sums in between is a choice (no_sync), not what DDP does "
    "by itself.",
    "6nd": "Counts neither attention nor recomputation.",
    "palm-flops": "Counts attention over the whole sequence; a causal kernel does half of that.",
    "megatron-flops": "96 holds where every layer is computed twice; percent of peak from it counts that work as well.",
    "data-traffic": "Sums of gradients, 2 bytes each; ZeRO-3 gathers weights twice more: half as much again.",
    "checkpoint-interval": "For saves of a minute and a failure in 50,000 hours of one GPU: measure your own.",
    "goodput": "To first order, with ten minutes to come back.",
}
