"""Models in folders of Hugging Face `transformers`: GPT-2, Llama and Qwen3."""
