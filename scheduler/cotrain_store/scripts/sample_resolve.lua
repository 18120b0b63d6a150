-- sample_resolve: a worker ends sample requests; the first result of each wins. Twice is harmless.
-- Fenced by the worker's epoch.
local epoch_key, refs, notify, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local epoch, counted = ARGV[1], ARGV[2]
local lives = { record = tonumber(ARGV[3]), told = tonumber(ARGV[4]) }
local hour, usage_ttl_s = ARGV[5], ARGV[6]
local FIRST = 7 -- then, for each request: its id, result, ttl ms, whether it failed, bytes, and what
                -- it used (JSON: amount by field)

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local totals = cjson.decode(counted) -- before anything is written: a script that fails undoes nothing
local resolved = {}
for i = FIRST, #ARGV, 6 do
  local amounts = cjson.decode(ARGV[i + 5])
  local tenant =
    finish(refs, lives, ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4])
  if tenant then
    resolved[#resolved + 1] = ARGV[i]
    note_unread(tenant, ARGV[i], ARGV[i + 4], tonumber(ARGV[i + 2]))
    for field, amount in pairs(amounts) do
      add_usage('cotrain:usage:' .. tenant .. ':' .. hour, field, amount, usage_ttl_s)
    end
  end
end
if #resolved > 0 then -- a repeat counts nothing
  for name, value in pairs(totals) do
    redis.call('HINCRBYFLOAT', counters, name, value)
  end
  redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
end
return 'OK'
