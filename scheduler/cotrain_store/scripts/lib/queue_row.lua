-- queue_row: return the runnable ops of a run: those with contiguous seqs from the first unplanned one on. A run that
-- is not ready has none.

-- Executed tokens of a run's next op. They are in the memory of one process; a later process starts the op anew.
local function done_tokens(begun, next_seq, epoch_key)
  local seq, tokens, epoch = string.match(begun, '^(%d+):(%d+):(%d+)$')
  return seq == next_seq and redis.call('GET', epoch_key) == epoch and tokens
end

local function queue_row(prefix, run, max_ops)
  local log = redis.call('HMGET', prefix .. 'log:' .. run, 'tenant', 'worker', 'next', 'begun')
  local has_worker = log[2] and redis.call('SISMEMBER', prefix .. 'workers', log[2]) == 1
  local begun = has_worker and log[4] and done_tokens(log[4], log[3], prefix .. 'epoch:' .. log[2])
  local row = { run, log[1] or '', has_worker and log[2] or '', log[3] or '0', begun or '0' }
  if not redis.call('ZSCORE', prefix .. 'ready', run) then
    return row
  end
  for seq = tonumber(log[3]), tonumber(log[3]) + max_ops - 1 do
    local envelope = redis.call('HGET', prefix .. 'ops:' .. run, seq)
    if not envelope then
      break
    end
    row[#row + 1] = envelope
  end
  return row
end
