-- ready: read the contiguous ops of every run that can go on. Changes nothing.
local ready = KEYS[1]
local prefix, max_runs, max_ops = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rows = {}
for _, run in ipairs(redis.call('ZRANGE', ready, 0, max_runs - 1)) do
  local log = redis.call('HMGET', prefix .. 'log:' .. run, 'tenant', 'worker', 'next')
  local is_placed = log[2] and redis.call('SISMEMBER', prefix .. 'workers', log[2]) == 1
  local row = { run, log[1], is_placed and log[2] or '', log[3] }
  for seq = tonumber(log[3]), tonumber(log[3]) + max_ops - 1 do
    local envelope = redis.call('HGET', prefix .. 'ops:' .. run, seq)
    if not envelope then
      break
    end
    row[#row + 1] = envelope
  end
  rows[#rows + 1] = row
end
return rows
