-- checkpoint_copy: give stored weights a second name, in a run made for it: closed, without a log.
-- Twice is harmless: answers the record there is.
local source, record_key, session_runs, training_runs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local checkpoint = KEYS[5]
local record, run, text, reader, created_at = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local known = redis.call('GET', checkpoint)
if known or redis.call('EXISTS', record_key) == 1 then
  return known or 'CONFLICT'
end
local original, copy = redis.call('GET', source), cjson.decode(text)
if not original then
  return 'GONE'
end
original = cjson.decode(original)
if original.weights ~= copy.weights or not (original.public or original.tenant == reader) then
  return 'GONE'
end
redis.call('HSET', record_key, 'record', record, 'state', 'closed')
count_record(copy.tenant, record)
redis.call('SADD', session_runs, run)
redis.call('ZADD', training_runs, created_at, run)
write_checkpoint(text, copy)
return text
