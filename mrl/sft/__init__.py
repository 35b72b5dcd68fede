"""`mrl sft`: supervised fine-tuning with the trainers, prompts and chat template of RL."""
