"""From logits to tokens: selection of the largest, processed logits, draws, and verification of drafts."""
