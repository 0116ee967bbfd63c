"""Words of captions in any language: tokenizers, subword models, and what each language needs."""
