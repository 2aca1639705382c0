"""What a model and its optimizer offer: prunable weights, facts for scores, shards, hooks and held masks."""
