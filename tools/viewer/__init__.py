"""One page to read saved samples: filters, and every token coloured by its log-probs."""
