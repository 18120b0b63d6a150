-- ready: read the contiguous ops of every run that can go on. Changes nothing.
local ready = unpack(KEYS)
local args = cjson.decode(ARGV[1])
local prefix, rows = args.prefix, {}

-- What ran of a run's next op is in the memory of one process: a later one of that worker id begins anew.
local function begun_tokens(begun, next_seq, epoch_key)
  local seq, tokens, epoch = string.match(begun, '^(%d+):(%d+):(%d+)$')
  return seq == next_seq and redis.call('GET', epoch_key) == epoch and tokens
end

for _, run in ipairs(redis.call('ZRANGE', ready, 0, args.max_runs - 1)) do
  local log = redis.call('HMGET', prefix .. 'log:' .. run, 'tenant', 'worker', 'next', 'begun')
  local has_worker = log[2] and redis.call('SISMEMBER', prefix .. 'workers', log[2]) == 1
  local begun = has_worker and log[4] and begun_tokens(log[4], log[3], prefix .. 'epoch:' .. log[2])
  local row = { run, log[1], has_worker and log[2] or '', log[3], begun or '0' }
  for seq = tonumber(log[3]), tonumber(log[3]) + args.max_ops_per_run - 1 do
    local envelope = redis.call('HGET', prefix .. 'ops:' .. run, seq)
    if not envelope then
      break
    end
    row[#row + 1] = envelope
  end
  rows[#rows + 1] = row
end
return rows
