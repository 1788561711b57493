"""Floor 2: learning. Batches, optimiser steps, publishing of weights and the broadcast schedule."""
