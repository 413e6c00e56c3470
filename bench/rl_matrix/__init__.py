"""The reinforcement loop's gates: rewards of FP8 and corrections beside bf16, over seeds."""
