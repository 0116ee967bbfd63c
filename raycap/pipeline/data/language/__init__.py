"""Words of captions in any language: tokenizers, subword models, and checks that a tokenizer fits the captions."""
