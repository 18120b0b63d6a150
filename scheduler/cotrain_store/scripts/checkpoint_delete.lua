-- checkpoint_delete: take a name away. The weights under it go when nothing else uses them.
local checkpoint = KEYS[1]
local tenant, member = ARGV[1], ARGV[2]

local text = redis.call('GET', checkpoint)
if not text or cjson.decode(text).tenant ~= tenant then
  return 'GONE'
end
redis.call('DEL', checkpoint)
strike_checkpoint(tenant, member)
return 'OK'
