// All row rules: the name in `Optimizer.native`, and the struct. A new rule is one header and one line here.
#pragma once

#include "adagrad.h"
#include "adagrad_momentum.h"
#include "adam.h"
#include "ftrl.h"
#include "momentum.h"
#include "rowwise_adagrad.h"
#include "sgd.h"

#define EMBEDFUSE_RULES(RULE)                 \
  RULE("sgd", Sgd)                            \
  RULE("momentum", Momentum)                  \
  RULE("adagrad", Adagrad)                    \
  RULE("rowwise_adagrad", RowWiseAdagrad)     \
  RULE("adam", Adam)                          \
  RULE("adamw", Adam)                         \
  RULE("ftrl", Ftrl)                          \
  RULE("adagrad_momentum", AdagradMomentum)
